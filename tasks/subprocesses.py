"""Run one command of the trainer in a process of its own, so that a crash in native code ends only that process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from onward.infra.parent_death import signalled_with_parent

TAIL_LINES = 20
PYTHON: tuple[str, ...] = (sys.executable,)
"""The words that start Python."""


def run_module(*arguments: str, folder: Path, log: Path, limit_s: float | None = None) -> str:
    """Run `python -m ARGUMENTS` to its end; return "" on success, else how it ended and the last lines of `log`.

    limit_s: the process is killed after that; None = never.
    """
    with log.open("wb") as output:
        try:
            ended = subprocess.run(
                # a killed flow must not leave a process behind that writes into the directory of a resumed run
                signalled_with_parent([*PYTHON, "-m", *arguments], signal.SIGKILL),
                # `-m` imports from the working directory first, so it must not be a directory of the user's
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return f"was not done after {limit_s:g} s, and was ended"
    if not ended.returncode:
        return ""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"status {ended.returncode}"
    return "\n  | ".join([f"ended with {how}, without a result. Its last lines:", *lines])
