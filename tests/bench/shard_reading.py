"""How much is read from the disk for an epoch of shards that are not in memory, and how long that takes.

    python -m tests.bench.shard_reading [--gigabytes 1] [--columns 32] [--memory-mb 0] [--disk-mb-s 0]      5 min

    once        the files from their beginnings to their ends, as `cat` reads them
    fits        rows in the shuffled order; all files are read ahead, once
    blocks      rows in the order of train.shuffle = "blocks", as if the shards were larger than the memory
    pages       rows in the shuffled order, likewise: their pages alone (a part of an epoch)
    before      the same with the kernel's own read-ahead around each row, as of earlier versions

Before each case the files are dropped from the page cache. Rows are taken in steps of 4,096.
--memory-mb: run each case in a memory control group with this limit, which the page cache counts to (root, version 1).
--disk-mb-s: run each case in a control group that reads the disk no faster, likewise; 0 = as fast as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.batches.sample_stream import SampleStream, rows_per_block
from onward.trainer.data.batches.shard_read_ahead import ShardReadAhead
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Shards
from onward.trainer.run.machine import this_machine
from tests.support.ranks import ROOT
from tests.support.shards import make_shards

CASES = ("once", "fits", "blocks", "pages", "before")
STEP = 4096
PART_S = 8.0
"""Longest time of a case that is slow."""
GROUPS = Path("/sys/fs/cgroup")


def write(folder: Path, gigabytes: float, columns: int) -> Path:
    """Write shards of about this size, with rows of `columns` float32 and a label."""
    rows = int(gigabytes * 1e9 / (4 * columns + 8))
    part = rows // 8
    random = np.random.default_rng(0)
    for number in range(8):
        values = random.random((part, columns), np.float32)
        np.savez(folder / f"{number}.npz", x=values, label=random.integers(0, 9, part))
    data = DataConfig(source=str(folder / "*.npz"), evaluation_fraction=0.001)
    directory, _, _ = make_shards(data, None, folder / "cache")
    for path in folder.glob("*.npz"):
        path.unlink()
    return directory


def drop(directory: Path) -> None:
    """Drop the shards from the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    """Bytes that this process had read from the disk."""
    found = Path("/proc/self/io").read_text()
    return int(found.partition("\nread_bytes:")[2].split()[0])


def measure(directory: Path, case: str) -> None:
    """Read in the way of a case, and print seconds, bytes read from the disk, rows, and seconds of processor time."""
    shards = open_shards(directory, "train")
    began_at, before, cpu_s = time.perf_counter(), read_bytes(), time.process_time()
    rows = shards.num_rows
    if case == "once":
        for file in shards.manifest.train:
            with (directory / file.name).open("rb", buffering=0) as opened:
                while opened.read(1 << 20):
                    pass
    else:
        rows = epoch(shards, case)
    found = time.perf_counter() - began_at, read_bytes() - before, rows, time.process_time() - cpu_s
    print(json.dumps(found))


def epoch(shards: Shards, case: str) -> int:
    """Read the rows of an epoch, or of PART_S; return how many."""
    this_machine.MEMORY_SHARE = 1.0 if case == "fits" else 0.0
    block = rows_per_block(shards.size_bytes, shards.num_rows) if case == "blocks" else 0
    stream = SampleStream([shards.num_rows], [1.0], seed=0, shuffle=True, block=block)
    ahead = ShardReadAhead(shards, stream) if case != "before" else None
    began_at = time.perf_counter()
    for first in range(0, shards.num_rows, STEP):
        if ahead:
            ahead.reach(first)
        shards.read(stream.rows(np.arange(first, min(first + STEP, shards.num_rows))))
        if case in ("pages", "before") and time.perf_counter() - began_at > PART_S:
            return first + STEP
    return shards.num_rows


def limited(command: list[str], kind: str, limit: str, value: str) -> list[str]:
    """Return the words that run a command in a control group of a kind, of which a limit has a value."""
    group = GROUPS / kind / "onward-shard-reading"
    group.mkdir(exist_ok=True)
    (group / limit).write_text(value)
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]


def run(directory: Path, case: str, memory_mb: int, disk_mb_s: int) -> tuple[float, int, int, float]:
    """Measure a case in a process of its own."""
    drop(directory)
    command = [sys.executable, "-m", "tests.bench.shard_reading", "--measure", str(directory), "--case", case]
    if memory_mb:
        command = limited(command, "memory", "memory.limit_in_bytes", str(memory_mb << 20))
    if disk_mb_s:
        device = directory.stat().st_dev
        rate = f"{os.major(device)}:{os.minor(device)} {disk_mb_s * 10**6}"
        command = limited(command, "blkio", "blkio.throttle.read_bps_device", rate)
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    elapsed_s, num_bytes, rows, cpu_s = json.loads(answer)
    return elapsed_s, num_bytes, rows, cpu_s


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--memory-mb", type=int, default=0)
    parser.add_argument("--disk-mb-s", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--case", choices=CASES)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.case)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = write(Path(folder), given.gigabytes, given.columns)
        size = sum(path.stat().st_size for path in directory.glob("train-*"))
        print(f"{size / 1e9:.2f} GB of shards; bytes read from the disk for each byte of the rows that were taken")
        print(f"{'':>8} {'seconds':>8} {'CPU s':>7} {'GB read':>8} {'per byte':>9} {'rows':>10}")
        for case in given.cases:
            elapsed_s, num_bytes, rows, cpu_s = run(directory, case, given.memory_mb, given.disk_mb_s)
            share = rows / open_shards(directory, "train").num_rows
            read = f"{num_bytes / 1e9:>8.2f} {num_bytes / (share * size):>9.2f} {rows:>10,}"
            print(f"{case:>8} {elapsed_s:>8.1f} {cpu_s:>7.1f} {read}", flush=True)


if __name__ == "__main__":
    main()
