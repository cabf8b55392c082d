"""Attempts without a model, to put under mpirun: `python -m tests.tasks.attempts HABIT RUN_DIR`."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

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


WATCHDOG = (
    "[rank1]:[E1122 ProcessGroupNCCL.cpp:744] [Rank 1] Some NCCL operations have failed or timed out.\n"
    "[rank1]:[E1122 ProcessGroupNCCL.cpp:2059] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread "
    "terminated with exception: {}\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)
"""What NCCL's watchdog writes before it aborts the process."""
TIMED_OUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=ALLREDUCE, NumelIn=4, "
    "NumelOut=4, Timeout(ms)=100000) ran for 100009 milliseconds before timing out."
)
ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], "
    "thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
)


def aborts(run: RunDir) -> int:
    """Rank 1 aborts in native code."""
    return _dies(run, "", os.abort)


def times_out(run: RunDir) -> int:
    """NCCL's watchdog aborts rank 1, because the others did not come to a collective."""
    return _dies(run, WATCHDOG.format(TIMED_OUT), os.abort)


def asserts(run: RunDir) -> int:
    """A kernel of rank 1 finds an index out of range, and NCCL's watchdog is the first to notice."""
    return _dies(run, ASSERTION + WATCHDOG.format("CUDA error: device-side assert triggered"), os.abort)


def crashes(run: RunDir) -> int:
    """Rank 1 reads memory that is not its own."""
    return _dies(run, "", lambda: os.kill(os.getpid(), signal.SIGSEGV))


def is_killed(run: RunDir) -> int:
    """Rank 1 is killed from outside, and rank 0 reports a lost peer; what others wrote is not the cause."""
    if RANK == 0:
        run.heartbeat.touch()
        _error(run, "RuntimeError: Connection closed by peer")
        time.sleep(20)
    return _dies(run, "CUDA error: of another rank\n", lambda: os.kill(os.getpid(), signal.SIGKILL))


def stands_still(run: RunDir) -> int:
    """The watchdog of rank 1 ends it after half a second without a heartbeat."""

    def stand_still() -> None:
        faulthandler.dump_traceback_later(0.5, exit=True, file=file)
        time.sleep(20)

    file = _tracebacks(run)
    return _dies(run, "", stand_still)


def runs_out_of_memory(run: RunDir, *, step: int = 9) -> int:
    """Rank 1 runs out of memory: in step 9, in every attempt."""
    # rank 0 ends after it has lost its peer; before, mpirun would end rank 1 for it
    while not RANK and not run.rank_error(run.current_attempt, 1).exists():
        time.sleep(0.02)
    _error(run, "OutOfMemory: CUDA out of memory. Tried to allocate 2.00 GiB." if RANK else "peer", step=step)
    return 70


def runs_out_of_memory_at_once(run: RunDir) -> int:
    """The same in step 1."""
    return runs_out_of_memory(run, step=1)


def _tracebacks(run: RunDir) -> IO[str]:
    return run.traceback(run.current_attempt, RANK).open("w")


def _dies(run: RunDir, last_words: str, end: Callable[[], None]) -> int:
    """Rank 1 writes to stderr and ends; rank 0 waits to be killed."""
    if RANK == 0:
        run.heartbeat.write_text('{"step": 4, "silence_s": 20}')
        time.sleep(20)
    while not run.heartbeat.exists():
        time.sleep(0.02)
    faulthandler.enable(_tracebacks(run))
    sys.stderr.write(last_words)
    sys.stderr.flush()
    end()
    return 70


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


def _error(run: RunDir, cause: str, *, step: int = 3) -> None:
    error = RankError(
        attempt=run.current_attempt,
        rank=RANK,
        host="here",
        step=step,
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
