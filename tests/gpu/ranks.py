"""Start ranks on the one device of the examination, without MPI: they meet in a file, and share the device over gloo.

    train(run)                                    as `python -m onward.trainer train RUN_DIR`, one process for each rank
    call(2, "tests.x:function", folder, 3.0)      function(mpi, folder, 3.0) on each of two ranks

A world of one rank uses NCCL on a GPU, as under mpirun. NCCL refuses two ranks on one GPU, so that worlds of several
ranks use gloo, which copies through the host: slow, with the same results.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.trainer.events import Event, read_events
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import AttemptResult, read_record
from tests.support import rank_server
from tests.support.ranks import ROOT

if TYPE_CHECKING:
    from onward.trainer.distributed.processes import MPIContext

STOPPED = 75
ENDED_BY_OTHERS_S = 5.0
"""How long the other ranks may write why they end, after one has failed; then they are killed, as mpirun does."""


def train(run: RunDir, *, timeout_s: float = 200) -> AttemptResult:
    """Train to the end; raises AssertionError with the first error of a rank, or the log, when no result was left."""
    log, processes = start(run)
    wait(processes, timeout_s)
    attempt = run.current_attempt
    assert run.result(attempt).exists(), f"{run.first_error(attempt)}\n{log.read_text(errors='replace')[-4000:]}"
    return read_record(run.result(attempt), AttemptResult)


def train_until(run: RunDir, reached: Callable[[Event], bool], number: int = signal.SIGKILL, *, rank: int = 0) -> None:
    """Start an attempt and send one rank a signal as soon as an event says so; wait for the end of all."""
    offset = run.events.stat().st_size if run.events.exists() else 0
    log, processes = start(run)
    deadline = time.monotonic() + 200
    while any(each.poll() is None for each in processes) and time.monotonic() < deadline:
        for event, after in read_events(run.events, offset):
            offset = after
            if reached(event):
                processes[rank].send_signal(number)
                wait(processes, 60)
                return
        time.sleep(0.002)
    wait(processes, 0)
    raise AssertionError(f"never came so far:\n{log.read_text(errors='replace')[-4000:]}")


def start(run: RunDir) -> tuple[Path, list[subprocess.Popen[bytes]]]:
    """Start the next attempt; return its log and one process for each rank."""
    attempt = run.begin_attempt()
    size = read_config(run).world_size
    return run.log(attempt), _start(size, run.root, run.log(attempt), "train", str(run.root))


def call(num_ranks: int, function: str, *arguments: Any, folder: Path, timeout_s: float = 300) -> None:
    """Call `module:function(mpi, *arguments)` on every rank; raises AssertionError with the output if one fails."""
    log = folder / f"{function.rpartition(':')[2]}-{uuid.uuid4().hex[:8]}.log"
    processes = _start(num_ranks, folder, log, "call", function, json.dumps(arguments))
    statuses = wait(processes, timeout_s)
    assert statuses == [0] * num_ranks, f"{statuses}:\n{log.read_text(errors='replace')[-6000:]}"


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Wait for the end of all ranks, and kill the others when one has failed or the time is over; their statuses."""
    deadline = time.monotonic() + timeout_s
    while any(each.poll() is None for each in processes) and time.monotonic() < deadline:
        if any(each.returncode not in (None, 0, STOPPED) for each in processes):
            deadline = min(deadline, time.monotonic() + ENDED_BY_OTHERS_S)
        time.sleep(0.01)
    for each in processes:
        if each.poll() is None:
            each.kill()
    return [each.wait() for each in processes]


def _start(size: int, folder: Path, log: Path, *words: str) -> list[subprocess.Popen[bytes]]:
    store = folder / f"store-{uuid.uuid4().hex}"
    processes = []
    with log.open("wb") as output:
        for rank in range(size):
            processes.append(
                subprocess.Popen(
                    [*rank_server.command(), "-m", __name__, str(store), str(rank), str(size), *words],
                    env={**os.environ, "PMIX_RANK": str(rank), "PYTHONUNBUFFERED": "1"},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


# -- on a rank


def join(
    store: str, rank: int, world_size: int, *, timeout_s: float, device: str = "auto", threads: int = 0
) -> MPIContext:
    """Do what `connect` does, without MPI: the ranks meet in the file `store`. Collective: every rank."""
    import torch
    import torch.distributed as dist

    from onward.trainer.distributed.processes import MPIContext
    from tests.gpu.device import DEVICE

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chosen = torch.device("cpu") if device == "cpu" else DEVICE
    torch.set_num_threads(max(1, threads))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        if limit := os.environ.get(MEMORY_LIMIT):
            total = torch.cuda.get_device_properties(chosen).total_memory
            torch.cuda.set_per_process_memory_fraction(int(limit) / total, chosen)
    alone = chosen.type == "cuda" and world_size == 1
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if alone else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=chosen if alone else None,
    )
    return MPIContext(rank, world_size, rank, world_size, socket.gethostname(), chosen)


def main(store: str, rank: int, world_size: int, what: str, *words: str) -> int:
    """Join the others and do what `words` say."""
    import torch.distributed as dist

    from onward.trainer import train_rank as trainer

    def connect(*, expected_world_size: int, ranks_per_gpu: int = 1, **options: Any) -> MPIContext:
        return join(store, rank, world_size, **options)

    def leave() -> None:
        dist.destroy_process_group()

    if step := os.environ.get(HANG_AT_STEP):
        _hang_at(int(step))
    if what == "train":
        trainer.connect, trainer.disconnect = connect, leave  # type: ignore[assignment]
        try:
            return trainer.train_rank(RunDir(Path(words[0])))
        except Exception as error:  # a fork of the server of ranks has no interpreter that calls the hook
            sys.excepthook(type(error), error, error.__traceback__)
            raise
    module, _, name = words[0].partition(":")
    mpi = join(store, rank, world_size, timeout_s=60, device="cuda", threads=1)
    getattr(importlib.import_module(module), name)(mpi, *json.loads(words[1]))
    leave()
    return 0


MEMORY_LIMIT, HANG_AT_STEP = "ONWARD_GPU_MEMORY_LIMIT", "ONWARD_GPU_HANG_AT_STEP"
"""Environment of ranks: bytes that the allocator of the GPU may take; the step at which the device stops answering."""

HANG_TIMEOUT_S = 3.0
"""The watchdog's limit in the step of HANG_AT_STEP."""


def _hang_at(wanted: int) -> None:
    """Let the device compute for minutes from the beginning of a step; on the CPU, let the thread wait."""
    import torch

    from onward.trainer.events import Heartbeat
    from tests.gpu.device import DEVICE

    beat = Heartbeat.beat

    def beat_and_hang(self: Heartbeat, step: int | None = None) -> None:
        beat(self, step)
        if step == wanted:
            self._timeout_s, self._touched_at = HANG_TIMEOUT_S, 0.0  # what comes before may take longer
            beat(self)
            if DEVICE.type == "cuda":
                torch.cuda._sleep(120 * 2_000_000_000)  # cycles: a minute or two, so that it ends by itself after all
                torch.cuda.synchronize()
            time.sleep(3600)

    Heartbeat.beat = beat_and_hang  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
