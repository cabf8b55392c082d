"""Stop a run of this machine, or of Slurm: its flow saves a checkpoint and ends, as after Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import time

from onward.flows.run_state.run_status import RunStatus, describe
from onward.flows.run_state.runs import find_run, holder_of, is_running, reference_to, stop_limit_s
from onward.flows.run_state.slurm_submission import forget_stopped, note_stopped
from onward.infra.job import slurm_jobs
from onward.infra.job.process_identity import is_gone
from onward.trainer.errors import ConfigError, RuntimeUnavailable, say
from onward.trainer.run.recorded.sweep_records import membership

MARGIN_S = 60.0
"""Seconds that the flow gets beside the ranks' own time: to end its tasks and to send the last metrics."""
LOOK_S = 0.2


def stop(text: str) -> RunStatus:
    """Ask the flow of a run to save and stop; wait for its end and return how it ended.

    Raises ConfigError for a run that does not run, RuntimeUnavailable when its process is on another machine, belongs
    to somebody else, or does not end in time.
    """
    run = find_run(text)
    name = reference_to(run)
    if not is_running(run):
        raise ConfigError(
            f"{name} does not run: it is {describe(run).state}; `onward status {name}` shows how it ended"
        )
    holder = holder_of(run)
    if is_gone(holder):  # the next one has just taken the lock, and has not signed it yet
        time.sleep(2 * LOOK_S)
        holder = holder_of(run)
    job = holder["slurm_job"] if holder else ""
    # a signal reaches processes of this machine only
    if holder is None or (not job and holder["host"] != socket.gethostname()):
        where = "a process that has not said which it is" if holder is None else f"process {holder['pid']}"
        on = "" if holder is None else f" on {holder['host']}"
        raise RuntimeUnavailable(f"{name} is run by {where}{on}: stop it there, or with Cancel in Prefect")
    if trial := membership(run):
        say(f"{name} is trial {trial.number} of a sweep, which stops with it")
    whom = f"job {job} of Slurm" if job else f"process {holder['pid']}"
    patience_s = stop_limit_s(run) + MARGIN_S
    say(f"asked {whom} to save {name} and to stop; this may take {patience_s:.0f} s")
    try:
        _end_job(job) if job else os.kill(holder["pid"], signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has ended meanwhile
    except slurm_jobs.SlurmError as error:
        raise RuntimeUnavailable(f"{name} is run by job {job} of Slurm, and {error}") from None
    except PermissionError:
        raise RuntimeUnavailable(
            f"process {holder['pid']} of {name} belongs to another user, who may stop it"
        ) from None
    deadline = time.monotonic() + patience_s
    # another process may take the lock at once, so the holder is watched as well
    while is_running(run) and not is_gone(holder):
        if time.monotonic() > deadline:
            raise RuntimeUnavailable(
                f"process {holder['pid']} of {name} has not ended in {patience_s:.0f} s; it still may: "
                f"`onward status {name}`. To end it at once, without saving: kill -9 {holder['pid']}"
            )
        time.sleep(LOOK_S)
    return describe(run)


def _end_job(job: str) -> None:
    """Ask the script of a job of Slurm to save and to end, and let nothing start it again. Raises SlurmError.

    Not by scancel alone, which leaves the ranks 30 s, whatever launch.stop_grace_s is.
    """
    # before the signal, after which the script would put its job back into the queue
    note_stopped(job)
    try:
        slurm_jobs.end_script(job)
    except slurm_jobs.SlurmError:
        forget_stopped(job)
        raise
