"""How much faster two cores write shards than one, for CSV and Parquet files: wall time and processor time.

    python -m tests.bench.sharding_cores [--megabytes 400] [--rounds 3]      3 min on 2 cores

    one core         one process that may use one core
    one process      one process on two cores, whose threads read ahead, parse and wait for the disk
    two processes    this process and another one, which write parts, and join them

The ways take turns, each in a process of its own, with an empty cache. The least wall time of the rounds is shown,
because other programs only add to it, and the median of the processor time of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.storage.part_processes import PartProcesses
from onward.trainer.data.storage.recipe import Recipe, stored_columns
from onward.trainer.data.storage.sharding import shard
from tests.bench.sharding_speed import NUMBERS, write
from tests.support.ranks import ROOT

WAYS = {"one core": (1, 1), "one process": (1, 2), "two processes": (2, 2)}
"""Processes, and cores."""
FILES = 4


def measure(folder: Path, way: str) -> None:
    """Shard the files of a folder, and print wall time and processor time."""
    processes, cores = WAYS[way]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    suffix = next(folder.iterdir()).suffix
    data = DataConfig(source=str(folder / f"*{suffix}"))
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        recipe = Recipe(data, stored_columns(data, NUMBERS), ())
        began_at = time.perf_counter()
        shard(recipe, Path(cache), runner=PartProcesses(processes))
        wall_s = time.perf_counter() - began_at
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps([wall_s, sum(each.ru_utime + each.ru_stime for each in used)]))


def main() -> None:
    """Print a line for each way and format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--way", choices=list(WAYS))
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.way)
        return
    print(f"{'':>10} {'':>14} {'wall s':>8} {'MB/s':>6} {'CPU s':>7} {'times one core':>15}")
    for suffix in (".csv", ".parquet"):
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder) / "data"
            files.mkdir()
            for number in range(FILES):
                write(files / f"{number}{suffix}", given.megabytes / FILES)
            size = sum(path.stat().st_size for path in files.iterdir()) / 1e6
            times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for _ in range(given.rounds):
                for way, found in times.items():
                    program = [sys.executable, "-m", "tests.bench.sharding_cores"]
                    command = [*program, "--measure", str(files), "--way", way]
                    found.append(json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout))
            least = {way: min(wall_s for wall_s, _ in found) for way, found in times.items()}
            for way, found in times.items():
                cpu_s = statistics.median(cpu_s for _, cpu_s in found)
                times_one = least["one core"] / least[way]
                speed = f"{least[way]:>8.2f} {size / least[way]:>6.0f} {cpu_s:>7.2f} {times_one:>15.2f}"
                print(f"{suffix:>10} {way:>14} {speed}", flush=True)


if __name__ == "__main__":
    main()
