"""Handle stop signals, and write the error of a failed rank into the run directory.

rank 1 raises --> excepthook writes errors/...rank-00001 --> exits with a status --> mpirun kills the other ranks
rank 0 loses its connection to rank 1 --> writes its own record, marked secondary --> waits PEER_DELAY_S --> exits
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType

from onward.trainer.distributed.processes import launched_rank
from onward.trainer.errors import Fenced, Refused, Stopped
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import RankError, write_record

PEER_DELAY_S = 2.0
"""Seconds that a rank waits before it exits when it only lost its connection to a peer. When the first rank exits,
mpirun kills the others, and the rank with the root cause must have written its error by then."""

_PEER_LOST = re.compile(
    "Connection (closed|reset) by peer|Connection refused|Broken pipe|remote process exited|nccl(Remote|System)Error"
    "|Timed out (waiting|after)|has timed out|[Ww]ait timeout|(Socket|Application) [Tt]imeout|operation timeout"
)


class StopSignal:
    """Records a request to stop (SIGUSR1, SIGTERM), so that all ranks can stop at the same step."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def install_excepthook(run: RunDir, *, attempt: int, step: Callable[[], int] = lambda: 0) -> None:
    """Install hooks that write an uncaught exception of any thread to `run.rank_error` and end the process.

    The exit status (78 refused, 72 fenced, 75 stopped, 70 anything else) makes mpirun end the other ranks.
    """

    def leave(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        error = error or kind()
        text = "".join(traceback.format_exception(kind, error, trace))
        secondary = lost_a_peer(error)
        try:
            record = RankError(
                attempt=attempt,
                rank=launched_rank() or 0,
                host=socket.gethostname(),
                step=step(),
                cause=f"{kind.__name__}: {error}",
                traceback=text,
                at_ms=time.time_ns() // 1_000_000,
                secondary=secondary,
            )
            write_record(run.rank_error(attempt, record.rank), record)
            sys.stderr.write(f"rank {record.rank}: {text}")
            if secondary:
                time.sleep(PEER_DELAY_S)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # without exit handlers and destructors, which may wait for collectives with ranks that are gone
            os._exit(_exit_status(error))

    # threads too: an exception in the communication thread would otherwise end that thread alone, and the others would
    # wait
    sys.excepthook = leave
    threading.excepthook = lambda failed: leave(failed.exc_type, failed.exc_value, failed.exc_traceback)


def lost_a_peer(error: BaseException) -> bool:
    """Return whether an error only reports that another rank has ended or does not answer."""
    return isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)) is not None


def _exit_status(error: BaseException) -> int:
    if isinstance(error, Refused):
        return 78
    return error.exit_code if isinstance(error, Fenced | Stopped) else 70
