"""The job of Slurm that was sent for a run, or stopped with it: HOME/submitted/NAME.json."""

from __future__ import annotations

from pathlib import Path

from onward.trainer.run.directory import onward_home
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.records import Record, read_record, write_record


class Submission(Record):
    """A job that was sent for a run, or that runs it."""

    job: str
    """Its id in Slurm."""
    stopped: bool = False
    """Whether somebody has stopped the run in this job, which then does not start it again."""


def submission_of(name: str) -> Submission | None:
    """Return the newest job of the run NAME; None if none was sent or stopped."""
    return read_record(_record(name), Submission) if _record(name).exists() else None


def note_submission(name: str, submission: Submission) -> None:
    """Write durably what becomes of the job of the run NAME."""
    make_private(onward_home())
    _record(name).parent.mkdir(exist_ok=True)
    write_record(_record(name), submission)


def _record(name: str) -> Path:
    return onward_home() / "submitted" / f"{name}.json"
