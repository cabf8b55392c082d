"""What is decided before a run is resumed: which run is meant, whether it can go on, and whether it is finished."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onward.flows.run_state.run_status import RunOutcome, is_finished, outcome_of
from onward.flows.run_state.runs import (
    command_to_continue,
    discard_damaged,
    find_run,
    how_to_train_further,
    is_running,
    reference_to,
)
from onward.flows.run_state.why_run_ended import cause_of
from onward.tasks.attempts.retry_policy import newest_checkpoint
from onward.tasks.storing.run_sender import send_rest
from onward.trainer.config.loading import load_config
from onward.trainer.errors import ConfigError, say
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.kept_settings import accept_edited, refuse_edited
from onward.trainer.run.recorded.sweep_records import membership
from onward.trainer.run.records import ExportedModel, read_record, record_if_written
from onward.trainer.run.remote.stored_run import Sending, record_in

if TYPE_CHECKING:
    from onward.trainer.config.loading import Override

log = logging.getLogger(__name__)


def checked_run(text: str, changes: Sequence[Override], *, from_start: bool) -> RunDir:
    """Return the run that `text` names. Raises ConfigError when it cannot be resumed, or not with these changes."""
    run = find_run(text)
    home = onward_home().resolve()
    # the flow looks for the run by its name, and under ONWARD_HOME only
    if run.root.resolve().parent != home / "runs":
        raise ConfigError(
            f"{run.root} is not a run of {home}; to resume it, set ONWARD_HOME={run.root.resolve().parents[1]}"
        )
    name = reference_to(run)
    if is_running(run):
        raise ConfigError(f"{name} is running already; `onward status {name}` shows its step")
    # only the sweep knows whether the trial is still wanted
    if membership(run):
        raise ConfigError(f"{name} is a trial of a sweep, which goes on with: {command_to_continue(run)}")
    if not run.config.exists():
        raise ConfigError(
            f"{name} cannot be resumed: it ended before its settings were saved ({cause_of(run).sentence}), and "
            "nothing was trained; start it again with `onward run`"
        )
    keys = [str(each[0] if isinstance(each, tuple) else each.partition("=")[0]).strip() for each in changes]
    # what a step does must stay, or the steps before and behind the resume are of different runs
    if fixed := [key for key in keys if key.partition(".")[0] != "stop"]:
        raise ConfigError(
            f"{', '.join(fixed)}: a run keeps the configuration that it began with, but for [stop]. To change it, "
            f"{how_to_train_further(run)}"
        )
    if from_start:
        discard_damaged(run)
    return run


def check_settings(run: RunDir, *, accept: bool) -> None:
    """Refuse a run whose config.json was edited, or accept it as it is, and say so on stderr."""
    if not accept:
        refuse_edited(run, command_to_continue(run))
        return
    known = run.accepted.exists()
    change = accept_edited(run, newest_checkpoint(run))
    unchanged = "config.json is as Onward has written it: nothing was to accept"
    unknown = "the run has no accepted.json, so it is not known whether config.json was edited"
    say(str(change or (unchanged if known else unknown)))


def outcome_if_finished(run: RunDir, changes: Sequence[Override]) -> RunOutcome | None:
    """Return how a run ended with which nothing is left to do, and say so on stderr; None for any other run."""
    # with the new limits: a higher one may leave something to do
    config = load_config(read_config(run, "given"), changes)
    if not is_finished(run, config.stop, config.checkpoint):
        return None
    # what could not be sent before
    sending = record_if_written(record_in(run), Sending)
    if sending and not sending.ended:
        say(f"sending what {sending.url} lacks")
        send_rest(run, log)
    say(f"{reference_to(run)} is finished, and nothing was started. To train further, {how_to_train_further(run)}")
    return outcome_of(run, read_record(run.exported, ExportedModel))
