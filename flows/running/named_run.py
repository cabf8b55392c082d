"""One run, one name: `onward run CONFIG --name X --continue` in a job that a scheduler starts again and again.

    no run is called X                       it begins
    X ended before it had settings           it begins, and takes the name over: nothing was trained
    X was killed, stopped or has failed      it is resumed
    X is finished                            nothing is started; exit status 0
    X runs, here or on another host          refused
    X runs on a host that is lost            it is resumed, once its lock was not renewed for a minute (lease.py)
    X was begun with other settings          refused, but for limits of [stop]: it goes on with those that are given

Of two processes that begin X at the same time, also on two hosts with one home, the second is refused: the first holds
the lock HOME/named/X from before it looks for the run until its end.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from onward.flows.run_state.lease import LEASE_S, free_abandoned, renewed
from onward.flows.run_state.run_index import listed_runs
from onward.infra.servers.service_state import try_lock
from onward.trainer.config.flat_settings import flat_settings, nested_settings
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, say, shown
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.names import owner_of
from onward.trainer.run.record_base import first_problem
from onward.trainer.run.recorded.setting_sources import Origins
from onward.trainer.run.records import read_record

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""The names of configurations, too."""


@dataclass(frozen=True)
class NamedRun:
    """A name for a run, and the run that has it."""

    name: str
    to_resume: RunDir | None = None
    """The run to go on with."""
    instead_of: str = ""
    """The id of a run that has the name and no settings, which gives it up."""


@contextlib.contextmanager
def named_run(name: str, *, may_continue: bool) -> Iterator[NamedRun]:
    """Yield what a name means, and keep other processes from using it inside. Raises ConfigError as drawn above."""
    if not NAME.fullmatch(name) or name == "last":
        raise ConfigError(
            f"--name {shown(repr(name))}: a name has up to 100 letters, digits, dots, hyphens and underscores, begins "
            "with a letter or a digit, and is not 'last'"
        )
    make_private(onward_home())
    folder = onward_home() / "named"
    folder.mkdir(exist_ok=True)
    path = folder / name
    if may_continue:
        # of a name that no run has, this is a directory, and no lock
        run = RunDir(onward_home() / "runs" / (owner_of(name) or ""))
        for freed in free_abandoned([path, run.lock]):
            say(f"{freed} was not renewed for {LEASE_S:g} s: its host is taken for lost")
    with path.open("ab") as lock:
        if not try_lock(lock):
            raise ConfigError(
                f"the run {name} is running already, or just begins; `onward status {name}` shows its step"
            )
        with renewed(lock, path):
            yield _meaning_of(name, may_continue=may_continue)


def _meaning_of(name: str, *, may_continue: bool) -> NamedRun:
    # the list also has runs of a names.db that was deleted
    of_lists = (run_id for run_id, status in listed_runs() if status["name"] == name)
    run_id = owner_of(name) or next(of_lists, None)
    if run_id is None:
        return NamedRun(name)
    run = RunDir(onward_home() / "runs" / run_id)
    if run.root.is_dir() and not run.config.exists():
        return NamedRun(name, instead_of=run_id)
    if not run.root.is_dir():
        raise ConfigError(f"the run {name} was deleted, and a name means one run for ever; choose another --name")
    if not may_continue:
        raise ConfigError(f"there is a run {name} already; go on with it by --continue, or choose another --name")
    return NamedRun(name, to_resume=run)


def limits_to_resume(run: RunDir, name: str, now: RunConfig) -> list[tuple[str, object]]:
    """Return the settings of [stop] in which a configuration differs from that of the run.

    Raises ConfigError, with every difference, when others differ: a run keeps the settings that it began with.
    """
    saved = read_config(run, "given")
    # config.json has what the run has chosen since: for "auto", for the inputs, for what its losses read
    began = read_record(run.origins, Origins).given if run.origins.exists() else {}
    try:
        # an earlier version may have begun it, which had other settings
        began = flat_settings(RunConfig.model_validate(nested_settings(began)) if began else saved)
    except ValidationError as error:
        raise ConfigError(f"{run.origins} cannot be used: {first_problem(error)}; delete it") from error
    wanted: dict[str, Any] = json.loads(json.dumps(flat_settings(now)))
    keys = [key for key in began | wanted if not key.startswith("stop.")]
    if fixed := [key for key in keys if began.get(key) != wanted.get(key)]:
        changes = [f"{name} began with {key} = {began.get(key)!r}, and now it is {wanted.get(key)!r}" for key in fixed]
        to_do = "a run keeps the settings that it began with: put them back, or choose another --name"
        raise ConfigError([*changes, to_do])
    return [(f"stop.{key}", value) for key, value in now.stop if value != getattr(saved.stop, key)]
