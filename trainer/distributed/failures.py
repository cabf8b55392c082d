"""Handle stop signals, and write the error of a failed rank into the run directory.

rank 1 raises --> excepthook writes errors/...rank-00001 --> exits with a status --> mpirun kills the other ranks
rank 0 loses its connection to rank 1 --> writes its own record, marked secondary --> waits PEER_DELAY_S --> exits

The space for the record is taken before the rank begins, because a full disk may be what it fails of.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from onward.trainer.distributed.launched import launched_rank
from onward.trainer.errors import Fenced, OnwardError, OutOfMemory, Refused, Stopped, TrainingFailed
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.outcomes.ending_kinds import PEER_LOST, Cause, explain, memory_advice
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.records import RankError
from onward.trainer.run.reserved import reserve, write_reserved

PEER_DELAY_S = 2.0
"""Seconds that a rank waits before it exits when it only lost its connection to a peer. When the first rank exits,
mpirun kills the others, and the rank with the root cause must have written its error by then."""


class StopSignal:
    """Records a request to stop (SIGUSR1, SIGTERM), so that all ranks can stop at the same step.

    mpirun signals the whole process group of a rank. SIGUSR1 would end a compiler that the rank waits for, and the rank
    with it, so it is blocked in all that the rank starts from now on, and a thread takes it.
    """

    def __init__(self) -> None:
        self.requested = False
        # threads that were started before do not block SIGUSR1; if one of them gets it, the handler runs
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._request)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        threading.Thread(target=self._wait, name="stop signal", daemon=True).start()

    def _wait(self) -> None:
        while signal.sigwait({signal.SIGUSR1}):
            self.requested = True

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def install_excepthook(run: RunDir, *, attempt: int, step: Callable[[], int] = lambda: 0) -> None:
    """Install hooks that write an uncaught exception of any thread to `run.rank_error` and end the process.

    The exit status (78 refused, 72 fenced, 75 stopped, 70 anything else) makes mpirun end the other ranks. Raises
    OSError when the disk is full already.
    """
    rank = launched_rank() or 0
    reserved = run.reserved_for(attempt, rank)

    def leave(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        error = error or kind()
        text = "".join(traceback.format_exception(kind, error, trace))
        # decided on torch's error, which the next line may replace
        secondary = lost_a_peer(error)
        error = own_error_of(error, run)
        try:
            record = RankError(
                attempt=attempt,
                rank=rank,
                host=socket.gethostname(),
                step=step(),
                cause=f"{type(error).__name__}: {error}",
                traceback=text,
                at_ms=time.time_ns() // 1_000_000,
                secondary=secondary,
            )
            # first: this needs no disk, unless the log is on the full one, too
            with contextlib.suppress(OSError):
                # sys.stderr is a buffer here, which torch's own hook would print after this one has returned
                print(f"rank {rank}: {text}", end="", file=sys.__stderr__, flush=True)
            write_reserved(run.rank_error(attempt, rank), record, reserved)
            if secondary:
                time.sleep(PEER_DELAY_S)
            sys.stdout.flush()
        finally:
            # without exit handlers and destructors, which may wait for collectives with ranks that are gone
            os._exit(_exit_status(error))

    # threads too: an exception in the communication thread would otherwise end that thread alone, and the others would
    # wait
    sys.excepthook = leave
    threading.excepthook = lambda failed: leave(failed.exc_type, failed.exc_value, failed.exc_traceback)
    reserve(reserved)


def lost_a_peer(error: BaseException) -> bool:
    """Return whether an error only reports that another rank has ended or does not answer."""
    return isinstance(error, RuntimeError) and PEER_LOST.search(str(error)) is not None


def own_error_of(error: BaseException, run: RunDir) -> BaseException:
    """Return Onward's error for one of a disk, or of torch after which a retry makes no sense; else the error."""
    if storage := storage_error(error, run.root):
        return storage
    cause = explain(str(error)) if isinstance(error, RuntimeError) else None
    if isinstance(error, MemoryError):  # of Python or numpy
        cause = Cause(OutOfMemory, str(error) or "the process got no more memory")
    if cause is None or cause.kind is TrainingFailed:
        return error
    advice = ""
    if cause.kind is OutOfMemory:
        with contextlib.suppress(OnwardError):  # the configuration, too, may be what is wrong
            advice = f". {memory_advice(read_config(run))}"
    # such as the path of a snapshot of the memory
    advice += "".join(f". {note}" for note in getattr(error, "__notes__", ()) if cause.kind is OutOfMemory)
    return cause.kind(f"{cause.sentence}{advice}")


def write_tracebacks(path: Path) -> IO[str]:
    """Write the Python traceback of all threads into a file when a signal such as SIGABRT or SIGSEGV ends the process.

    The exception hooks do not run then. Returns the open file, for the tracebacks of the heartbeat's watchdog.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    faulthandler.enable(file)
    return file


def write_stacks_when_ended(path: Path) -> None:
    """Write the Python stacks of all threads into a file at SIGTERM, which mpirun sends before it kills the ranks.

    The file is written by a signal handler in C, so also while C code holds the GIL. StopSignal's handler runs after
    it.
    """
    # faulthandler keeps the file open
    faulthandler.register(signal.SIGTERM, file=path.open("w"), all_threads=True, chain=True)


def trace_collectives(prefix: Path) -> None:
    """Let NCCL's watchdog write the last collectives of this rank to `prefix` + rank when one fails or times out.

    Call before `connect`. What the user has set takes precedence. The watchdog then ends the process by SIGABRT, which
    is torch's default (TORCH_NCCL_ASYNC_ERROR_HANDLING = 3); it waits for the file no longer than a few seconds, so
    that this comes before the end by a missing heartbeat.
    """
    for name, value in {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(prefix),
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000",
    }.items():
        os.environ.setdefault(name, value)


def _exit_status(error: BaseException) -> int:
    if isinstance(error, Refused):
        return 78
    return error.exit_code if isinstance(error, Fenced | Stopped) else 70
