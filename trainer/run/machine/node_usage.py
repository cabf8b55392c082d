"""What the job uses of each node: processor, memory, disk, network and GPUs, as one JSON line every PERIOD_S.

    RUN_DIR/nodes/rank-00008.jsonl    of the node whose first rank is rank 8; the lines have the form of the event log

    {"at_ms": 1767225600000, "attempt": 1, "step": 12, "kind": "usage", "node": "gpu-2", "values": {"cpu_...": 93.1}}

The names are those of MLflow's own system metrics. `step` counts the lines of a file, over all attempts.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from onward.trainer.events import EventWriter, Usage, read_events
from onward.trainer.run.directory import RunDir

PERIOD_S = 10.0
FIRST_S = 1.0
"""Seconds until the first line, so that a short run has some."""
MEGABYTE = 1e6


@contextlib.contextmanager
def recorded_usage(run: RunDir, *, attempt: int, rank: int, local_rank: int, host: str) -> Iterator[None]:
    """Record what the node uses while the block runs, in a thread of the first rank of each node.

    A file that cannot be written any more ends the record, and not the training.
    """
    # the counters are those of the node, so one rank of each node is enough
    if local_rank != 0:
        yield
        return
    done = threading.Event()
    writing = (run.usage_of(rank), attempt, host, done)
    thread = threading.Thread(target=_record, args=writing, name="node usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # a disk that hangs must not keep the rank from ending
        thread.join(timeout=PERIOD_S)


def _record(path: Path, attempt: int, host: str, done: threading.Event) -> None:
    with contextlib.suppress(OSError):
        writer = EventWriter(path, attempt=attempt, rank=0, announces=False)
        # a resumed attempt continues the numbering, by which MLflow orders the points
        line = sum(1 for _ in read_events(path))
        usage = NodeUsage(path.parent)
        period_s = FIRST_S
        ended = False
        while not ended:
            ended = done.wait(period_s)  # and one last line
            line += 1
            period_s = PERIOD_S
            writer.emit(Usage(step=line, node=host, values=usage.now()))
        writer.close()


class NodeUsage:
    """Measures the usage of this node. `disk`: a path on the disk that counts."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._network = psutil.net_io_counters()
        self._nvidia = shutil.which("nvidia-smi")
        psutil.cpu_percent()  # the first call begins the interval that the next one measures

    def now(self) -> dict[str, float]:
        """Return name -> value; of processor and network since the call before, or since the beginning."""
        memory = psutil.virtual_memory()
        network = psutil.net_io_counters()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MEGABYTE,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": psutil.disk_usage(str(self._disk)).percent,
        }
        if network and self._network:
            values["network_receive_megabytes"] = (network.bytes_recv - self._network.bytes_recv) / MEGABYTE
            values["network_transmit_megabytes"] = (network.bytes_sent - self._network.bytes_sent) / MEGABYTE
        return values | self._gpus()

    def _gpus(self) -> dict[str, float]:
        """Return the usage of each GPU; {} without one. A tool that fails once is not asked again."""
        if not self._nvidia:
            return {}
        query = "index,utilization.gpu,memory.used,memory.total,power.draw"
        command = [self._nvidia, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            # each call would wait for its time limit again
            self._nvidia = None
            return {}
        return gpu_values(said)


def gpu_values(said: str) -> dict[str, float]:
    """Return name -> value from the lines of nvidia-smi: index, utilization, MiB used, MiB of all, watts.

    A value that the GPU does not measure, such as `[N/A]`, is left out.
    """
    values: dict[str, float] = {}
    for line in said.splitlines():
        index, *numbers = (field.strip() for field in line.split(","))
        utilization, used, total, power = (_number(text) for text in (*numbers, "", "", "", "")[:4])
        # nvidia-smi counts in MiB, and MLflow's names of system metrics say megabytes
        mebibyte = 2**20 / MEGABYTE
        found = {"utilization_percentage": utilization}
        if used is not None:
            found["memory_usage_megabytes"] = used * mebibyte
            if total:
                found["memory_usage_percentage"] = 100 * used / total
        found["power_usage_watts"] = power
        values |= {f"gpu_{index}_{name}": value for name, value in found.items() if value is not None}
    return values


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
