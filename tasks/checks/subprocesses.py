"""Run one command of the trainer in a process of its own, so that a crash in native code ends only that process."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from onward.infra.job import forks
from onward.infra.job.child_program import signalled_with_parent
from onward.trainer.run.outcomes.refusals import refusal_in
from onward.trainer.run.outcomes.storage import storage_cause

TAIL_LINES = 20


def run_module(*arguments: str, folder: Path, log: Path, limit_s: float | None = None) -> str:
    """Run `python -m ARGUMENTS` to its end; return "" on success, else how it ended and the last lines of `log`.

    limit_s: the process is killed after that; None = never.
    """
    return how_it_ended(start_module(*arguments, folder=folder, log=log), log, limit_s=limit_s)


def start_module(*arguments: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `python -m ARGUMENTS`, which writes into `log`. Call it from a thread that lives as long."""
    with log.open("wb") as output:
        return subprocess.Popen(
            # a killed flow must not leave a process behind that writes into the directory of a resumed run
            signalled_with_parent([*forks.python(), "-m", *arguments], signal.SIGKILL),
            # `-m` imports from the working directory first, so it must not be a directory of the user's
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def how_it_ended(process: subprocess.Popen[bytes], log: Path, *, limit_s: float | None = None) -> str:
    """Wait for a process; return as `run_module`. It is killed when the waiting is interrupted.

    Raises StorageUnavailable when the process left no refusal beside `log`, and a disk is what it has ended for.
    """
    try:
        code = process.wait(limit_s)
    except BaseException as error:
        process.kill()
        process.wait()
        # the process is ended in any case: nobody would wait for it any more
        if isinstance(error, subprocess.TimeoutExpired):
            return f"was not done after {limit_s:g} s, and was ended"
        raise
    if not code:
        return ""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    how = f"signal {-code}" if code < 0 else f"status {code}"
    ending = "\n  | ".join([f"ended with {how}, without a result. Its last lines:", *lines])
    # a refusal is the process's own word; without it the end of the log may name a disk
    if not refusal_in(log.parent).exists() and (storage := storage_cause(ending, log.parent)):
        raise storage
    return ending
