"""Attempts without a model, to put under mpirun: `python -m tests.tasks.attempts HABIT RUN_DIR`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import AttemptResult, RankError, write_record

RANK = int(os.environ.get("PMIX_RANK", "0"))


def finishes(run: RunDir) -> int:
    """Says done, and ends."""
    return _result(run, "done", step=8)


def lies(run: RunDir) -> int:
    """Ends with status 0, and no result: so does mpirun when a remote host dies."""
    print("all is well")
    return 0


def fails(run: RunDir) -> int:
    """Rank 1 is to blame; rank 0 has noticed it was gone before rank 1 could write."""
    _error(run, "ValueError: a NaN in row 17" if RANK == 1 else "RuntimeError: Connection closed by peer")
    return 70


def is_refused(run: RunDir) -> int:
    """Finds the configuration impossible."""
    _error(run, "ConfigError: no weight matches 'conv*'\nno column 'pixels'")
    return 78


def diverges(run: RunDir) -> int:
    """Finds a loss that is not finite."""
    _error(run, "Diverged: step 3: loss nan")
    return 70


def dies_once(run: RunDir) -> int:
    """The first attempt is killed; the second is done."""
    if run.current_attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _result(run, "done", step=8)


def waits(run: RunDir) -> int:
    """Moves until it is asked to stop; then saves."""
    asked: list[bool] = []
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
    (run.root / f"up-{RANK}").touch()
    while not asked:
        if len(list(run.root.glob("up-*"))) == 2:
            run.heartbeat.touch()
        time.sleep(0.02)
    _result(run, "stopped", step=5)
    return 75


def does_not_save(run: RunDir) -> int:
    """Leaves when asked to stop, with nothing saved."""
    run.heartbeat.touch()
    signal.pause()
    return 0


def _result(run: RunDir, status: str, *, step: int) -> int:
    if RANK == 0:
        attempt = run.current_attempt
        values = {"attempt": attempt, "status": status, "step": step, "samples_seen": 4 * step}
        result = AttemptResult.model_validate(values | {"metrics": {"evaluation/loss": 0.5}, "elapsed_s": 2.0})
        write_record(run.result(attempt), result)
    return 0


def _error(run: RunDir, cause: str) -> None:
    error = RankError(
        attempt=run.current_attempt,
        rank=RANK,
        host="here",
        step=3,
        cause=cause,
        traceback="",
        at_ms=time.time_ns() // 1_000_000 + 1000 * RANK,
        secondary="peer" in cause,
    )
    write_record(run.rank_error(error.attempt, RANK), error)
    deadline = time.monotonic() + 5  # the first rank to leave has the others killed
    while len(list(run.errors.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](RunDir(Path(sys.argv[2]))))
