"""The settings with which a run may go on: RUN_DIR/accepted.json keeps what Onward has written into config.json.

A config.json that differs was edited by a person, and the run would go on with another computation. It is refused,
until `onward resume RUN --accept-config` accepts the settings; the record then keeps what was changed, and when. Limits
of [stop] are free, because a resume may change them. Runs of earlier versions have no such record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.trainer.config.flat_settings import flat_settings
from onward.trainer.config.removed_settings import refusals
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError, RecordError
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.recorded.sweep_records import membership
from onward.trainer.run.records import Record, read_record, utc_now, write_record


class AcceptedChange(Record):
    """Settings that a person has changed in config.json, and that were accepted."""

    at: str
    """ISO 8601, UTC."""
    step: int
    """The newest checkpoint at that time: later steps may have been made with the new settings."""
    changes: tuple[str, ...]
    """Such as `optimizer.learning_rate was 0.001, and is 0.1`."""

    def __str__(self) -> str:
        return f"config.json was edited, and accepted at step {self.step} ({self.at}): {'; '.join(self.changes)}"


class KeptSettings(Record):
    """The settings of a run as they were written or accepted last, and the changes that were accepted."""

    settings: RunConfig
    accepted: tuple[AcceptedChange, ...] = ()


def write_settings(run: RunDir, config: RunConfig) -> None:
    """Write config.json, and keep the settings beside it."""
    # in this order: between the two writes nothing but [stop] differs, or there is no config.json yet
    write_record(run.accepted, KeptSettings(settings=config, accepted=accepted_changes(run)))
    write_record(run.config, config)


def accepted_changes(run: RunDir) -> tuple[AcceptedChange, ...]:
    """Return the changes of config.json that were accepted, oldest first; () if their record is damaged."""
    try:
        return read_record(run.accepted, KeptSettings).accepted
    except RecordError:
        return ()


def edited_settings(run: RunDir, config: RunConfig | None = None) -> list[str]:
    """Return what was edited in config.json, a clause for each setting; [] also for a run that keeps no settings.

    config: config.json as it is, None = it is read here. Raises ConfigError when it cannot be read, RecordError when
    the record beside it cannot.
    """
    if not run.accepted.exists():
        return []
    config = config or read_config(run, "given")  # first: its problems are said more clearly
    present = flat_settings(config) | config.left_out
    accepted = read_record(run.accepted, KeptSettings).settings
    kept = flat_settings(accepted) | accepted.left_out
    edited = []
    for key in kept | present:
        # the limits of [stop] may change: a resume raises them
        if kept.get(key) != present.get(key) and not key.startswith("stop."):
            edited.append(f"{key} was {kept.get(key)!r}, and is {present.get(key)!r}")
    return edited


def refuse_left_out(left_out: Mapping[str, Any], within: str = "") -> None:
    """Raise ConfigError for settings, those `within` one, that only the earlier version that began a run computes."""
    if problems := refusals({key: value for key, value in left_out.items() if key.startswith(within)}):
        raise ConfigError(problems)


def refuse_edited(run: RunDir, command: str = "", *, config: RunConfig | None = None) -> None:
    """Raise ConfigError when config.json was edited, or cannot be computed any more: all that goes on calls this.

    command: the one that resumes the run. config: as in `edited_settings`.
    """
    refuse_left_out((config or read_config(run, "given")).left_out)
    accept = f"accept it with `{command or f'onward resume {run.root.name}'} --accept-config`"
    further = f"start a new run, or {accept}, which the report will say"
    if membership(run):  # its trials are compared by the settings that the sweep has given them
        accept = further = "or start a new sweep"
    try:
        edited = edited_settings(run, config)
    except RecordError as error:
        raise ConfigError(
            f"{error}; so it is not known whether {run.config} was edited: look at it, then {accept}"
        ) from None
    if edited:
        raise ConfigError(
            [
                *(f"in {run.config}, {change}" for change in edited),
                f"a run keeps the settings that it began with: put them back, {further}",
            ]
        )


def accept_edited(run: RunDir, step: int) -> AcceptedChange | None:
    """Accept config.json as it is, and record what was changed; None if nothing was. step: the newest checkpoint's."""
    refuse_left_out(read_config(run, "given").left_out)
    try:
        changes = tuple(edited_settings(run))
    except RecordError:
        changes = ("its earlier settings are not known, because their record was damaged",)
    if not changes:
        return None
    at = utc_now()
    change = AcceptedChange(at=at, step=step, changes=changes)
    write_record(
        run.accepted, KeptSettings(settings=read_config(run, "given"), accepted=(*accepted_changes(run), change))
    )
    return change
