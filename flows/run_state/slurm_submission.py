"""Jobs of Slurm: which was sent for a run, and which are not to be started again.

HOME/submitted/NAME.json      the newest job that was sent for the run NAME
HOME/submitted/stopped/JOB    somebody has stopped the run in this job
"""

from __future__ import annotations

from pathlib import Path

from onward.trainer.run.directory import onward_home
from onward.trainer.run.machine.private_home import make_private
from onward.trainer.run.records import Record, record_if_written, write_record


class Submission(Record):
    """A job that was sent for a run."""

    job: str
    """Its id in Slurm."""


def submission_of(name: str) -> Submission | None:
    """Return the newest job of the run NAME; None if none was sent."""
    return record_if_written(_record(name), Submission)


def note_submission(name: str, submission: Submission) -> None:
    """Write durably which job was sent for the run NAME."""
    make_private(onward_home())
    _record(name).parent.mkdir(exist_ok=True)
    write_record(_record(name), submission)


def note_stopped(job: str) -> None:
    """Write that somebody has stopped the run in a job, which then does not start it again."""
    # by the job and not by the run, which may have another name where it was fetched from a store
    _stopped(job).parent.mkdir(parents=True, exist_ok=True)
    _stopped(job).touch()


def forget_stopped(job: str) -> None:
    """Take back `note_stopped`."""
    _stopped(job).unlink(missing_ok=True)


def is_stopped(job: str) -> bool:
    """Return whether somebody has stopped the run in a job."""
    return _stopped(job).exists()


def _stopped(job: str) -> Path:
    return onward_home() / "submitted" / "stopped" / job


def _record(name: str) -> Path:
    return onward_home() / "submitted" / f"{name}.json"
