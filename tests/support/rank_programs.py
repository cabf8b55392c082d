"""Small programs to run under mpirun: `python -m tests.support.rank_programs NAME FOLDER`, one name per behaviour.

Each creates `up-RANK` in the folder when it has started. Unlike the trainer's ranks, none is killed with its parent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ.get("PMIX_RANK", "0"))


def behaved(folder: Path) -> None:
    """Moves; saves and leaves when asked to."""
    asked = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    _beat(folder, up=True)
    while not asked:
        _beat(folder)
    # Python restores the default action while it ends; a second SIGUSR1 would kill this rank then, and mpirun the other
    # one before it has saved. (The trainer's ranks block the signal.)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    (folder / f"saved-{RANK}").touch()
    sys.exit(75)


def deaf(folder: Path) -> None:
    """Moves; will not be stopped."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _beat(folder, up=True)
    while True:
        _beat(folder)


def stands_still(folder: Path) -> None:
    """Moves once; then stops itself, which no signal but SIGKILL gets through."""
    _beat(folder, up=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def compiles(folder: Path) -> None:
    """Says that it may be silent for two seconds; then is silent for longer."""
    if RANK == 0:
        (folder / "heartbeat").write_text('{"step": 1, "silence_s": 2.0}')
    (folder / f"up-{RANK}").touch()
    signal.pause()


def never_moves(folder: Path) -> None:
    """Hangs before its first heartbeat."""
    (folder / f"up-{RANK}").touch()
    signal.pause()


def dies(folder: Path) -> None:
    """Rank 1 goes without a word; rank 0 notices nothing."""
    _beat(folder, up=True)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        _beat(folder)


def ends(folder: Path) -> None:
    """Prints and leaves."""
    print(f"rank {RANK} was here")


def supervise(folder: Path) -> None:
    """Not a rank: a flow, so to say, that runs two behaved (or other) ranks."""
    from tests.infra.job.test_job import job

    job(folder, sys.argv[3], grace_s=3.0).run()


def _beat(folder: Path, *, up: bool = False) -> None:
    if RANK == 0:
        (folder / "heartbeat").touch()
    if up:
        (folder / f"up-{RANK}").touch()
    else:
        time.sleep(0.02)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
