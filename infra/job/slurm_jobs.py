"""Jobs of Slurm: ask about one, send, cancel and requeue it, by Slurm's own commands.

A batch script runs on the first host of its job and starts the flow there; what is sent is written by
flows/submitting/slurm_script.py, and how ranks start inside of a job is in srun.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import psutil

ANSWER_S = 20.0
"""Longest time for the answer of a command: slurmctld may be busy, or away."""
ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED"),
)
"""The states of jobs that Slurm does not start again; one that is requeued is PENDING."""


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm knows of a job."""

    job: str
    state: str
    """As squeue writes it: PENDING, RUNNING ..."""
    reason: str = ""
    """Why it waits, or has ended; "" if Slurm says none."""
    hosts: str = ""
    """Such as n[1-3]."""
    ends: str = ""
    """When it ends at the latest, or has ended, in local time; "" without a limit."""

    @property
    def has_ended(self) -> bool:
        """Whether Slurm will not start it again."""
        return self.state.startswith(ENDED)

    def __str__(self) -> str:
        """Return it in words."""
        parts = [f"job {self.job} of Slurm is {self.state}"]
        parts += [f"({self.reason})"] if self.reason else []
        parts += [f"on {self.hosts}"] if self.hosts else []
        parts += [f"and ends at {self.ends} at the latest"] if self.state == "RUNNING" and self.ends else []
        return " ".join(parts)


class SlurmError(Exception):
    """Slurm has refused something, or does not answer."""


def allocation(environment: Mapping[str, str] = os.environ) -> str:
    """Return the id of the job of Slurm in which this process runs; "" outside of one."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    # one task of an array has the number of the array, which means all of its tasks
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def batch_job() -> str:
    """Return the id of the job of Slurm whose batch script this process is, by `exec`; "" for any other process.

    Other programs of a job, such as a notebook server that a batch job starts, do not end or requeue all of it.
    """
    return allocation() if os.environ.get("ENVIRONMENT") == "BATCH" and _is_script() else ""


def _is_script() -> bool:
    parent = psutil.Process().parent()
    return parent is not None and parent.name() == "slurmstepd"


def find(job: str) -> SlurmJob | None:
    """Return what is known of a job: of squeue, and of the accounting once squeue has forgotten it; None if nothing."""
    for words in (
        ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N|%e"],
        ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State,Reason,NodeList,End"],
    ):
        # squeue refuses a job that it has forgotten, and then the accounting is asked
        with contextlib.suppress(SlurmError):
            if lines := _said(words).splitlines():
                # both programs have words of their own for a field without a value
                state, *more = (
                    re.sub(r"^(None|N/A|NONE|Unknown|None assigned)$", "", each) for each in lines[0].split("|")
                )
                return SlurmJob(job, state, *more)
    return None


def ends_at(environment: Mapping[str, str] = os.environ) -> float:
    """Return when the job in which this process runs ends, in seconds since 1970; infinity if that is not known."""
    job = allocation(environment)
    if not job:
        return math.inf
    found = find(job)
    # Slurm is asked first: a limit may have been changed since the variable was set
    with contextlib.suppress(ValueError, KeyError):
        return datetime.fromisoformat(found.ends).timestamp() if found else float(environment["SLURM_JOB_END_TIME"])
    return math.inf


def send(script: str, *, folder: str) -> str:
    """Send a script, and return the id of its job. Raises SlurmError.

    folder: its working directory.
    """
    # where there are several clusters, --parsable adds the name of one behind a semicolon
    return _said(["sbatch", "--parsable", f"--chdir={folder}"], script).strip().split(";")[0]


def cancel(job: str) -> None:
    """Cancel a job: its processes are signalled, and killed KillWait later, 30 s by default. Raises SlurmError."""
    _said(["scancel", job])


def end_script(job: str) -> None:
    """Send SIGTERM to the script of a job and to nothing else: it may take its time to end. Raises SlurmError."""
    _said(["scancel", "--batch", "--signal=TERM", job])


def requeue(job: str) -> None:
    """Let Slurm end a job at once, and start it again. Raises SlurmError."""
    _said(["scontrol", "requeue", job])


def _said(words: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{words[0]} gives no answer: {error}") from error
    if done.returncode:
        raise SlurmError(f"{words[0]}: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout
