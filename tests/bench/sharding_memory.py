"""Peak memory while sharding inputs of growing size: `python -m tests.bench.sharding_memory [MB ...]`.

Each case is a process of its own, which reports its peak resident memory above what its imports take; that
it does not grow with the input is what is shown. Exits with 1 if the largest input takes more than
ALLOWED_GROWTH times the memory of the smallest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.schema.columns import ColumnType
from tests.support.ranks import ROOT
from tests.support.shards import make_shards

SIZES_MB = (50, 100, 200)
ALLOWED_GROWTH = 1.3
NUM_FEATURES = 32
SUFFIXES = (".csv", ".jsonl", ".parquet")


def write(path: Path, megabytes: int) -> None:
    """A table of random numbers of this size, in the format of the path's suffix."""
    random = np.random.default_rng(0)
    if path.suffix == ".parquet":  # one row group, the hardest case
        rows = random.random((megabytes * 1_000_000 // NUM_FEATURES // 4, NUM_FEATURES), np.float32)
        columns = {
            "x": pa.FixedSizeListArray.from_arrays(rows.ravel(), NUM_FEATURES),
            "label": np.arange(len(rows)) % 9,
        }
        pq.write_table(pa.table(columns), path, row_group_size=len(rows))
        return
    names = [f"x{number}" for number in range(NUM_FEATURES)]
    with path.open("w") as file:
        if path.suffix == ".csv":
            file.write(",".join([*names, "label"]) + "\n")
        while file.tell() < megabytes * 1_000_000:
            for row in random.random((2000, NUM_FEATURES)).round(6).tolist():
                label = random.integers(0, 9)
                if path.suffix == ".csv":
                    file.write(",".join(map(str, row)) + f",{label}\n")
                else:
                    file.write(json.dumps({"x": row, "label": int(label)}) + "\n")


def measure(path: Path) -> None:
    """Shard one file and print: peak bytes above the imports, seconds, rows."""
    import pandas  # noqa: F401 - counted with the imports

    scalar = ColumnType("float32", ())
    features = (
        {f"x{number}": scalar for number in range(NUM_FEATURES)}
        if path.suffix == ".csv"
        else {"x": ColumnType("float32", (NUM_FEATURES,))}
    )
    before, started_at = peak_bytes(), time.monotonic()
    data = DataConfig(source=str(path))
    _, manifest, _ = make_shards(data, features | {"label": ColumnType("int64", ())}, path.parent / "cache")
    print(json.dumps([peak_bytes() - before, time.monotonic() - started_at, manifest.rows("train")]))


def peak_bytes() -> int:
    """This process's greatest resident memory; getrusage would count the parent's as well."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main(sizes: list[int]) -> int:
    print(f"{'input':>16} {'rows':>9} {'seconds':>8} {'MB/s':>6} {'peak MB':>8}")
    bounded = True
    for suffix in SUFFIXES:
        peaks = []
        for megabytes in sizes:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"data{suffix}"
                write(path, megabytes)
                command = [sys.executable, "-m", "tests.bench.sharding_memory", "--measure", str(path)]
                answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
            peak, seconds, rows = json.loads(answer)
            peaks.append(peak)
            print(
                f"{f'{megabytes} MB {suffix}':>16} {rows:>9,} {seconds:>8.1f} "
                f"{megabytes / seconds:>6.0f} {peak / 1e6:>8.0f}",
                flush=True,
            )
        bounded &= peaks[-1] <= ALLOWED_GROWTH * peaks[0]
    print("bounded" if bounded else f"NOT bounded: more than {ALLOWED_GROWTH} times as much for the largest input")
    return 0 if bounded else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    else:
        sys.exit(main([int(size) for size in sys.argv[1:]] or list(SIZES_MB)))
