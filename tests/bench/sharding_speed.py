"""How fast data is sharded, beside what pandas and pyarrow take to read the same file alone.

    python -m tests.bench.sharding_speed [--megabytes 200] [--rounds 5]      2 min on 2 cores

    numbers    20 columns of floats of 6 decimals and a label, as CSV and as Parquet
    digits     the same with all digits of a float64
    texts      CSV with a category, a text in quotes, a number and a label
    plain      the same texts without quotes

Each round reads a file in turn with Onward (its digest, its columns, shards written, hashed and flushed to the disk,
into an empty cache), with pandas and with pyarrow, which read it into memory. Figures are the size of the file over the
processor time of the process with all its threads, and over the wall time: the median of the rounds. The ratios are of
processor times, Onward's over the other's in the same round: median (least to greatest).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.schema.columns import ColumnType
from tests.support.shards import make_shards

NAMES = [f"f{number}" for number in range(20)]
FLOAT, LABEL, TEXT = ColumnType("float32", ()), ColumnType("int64", ()), ColumnType("str")
NUMBERS = dict.fromkeys(NAMES, FLOAT) | {"label": LABEL}
TEXTS = {"size": FLOAT, "city": TEXT, "text": TEXT, "label": LABEL}
CASES: Mapping[str, Mapping[str, ColumnType]] = {
    "numbers.csv": NUMBERS,
    "numbers.parquet": NUMBERS,
    "digits.csv": NUMBERS,
    "texts.csv": TEXTS,
    "plain.csv": TEXTS,
}
PART_ROWS = 20_000


def part(name: str, random: np.random.Generator) -> pd.DataFrame:
    """Return some rows of a case."""
    label = random.integers(0, 2, PART_ROWS)
    if name.startswith(("texts", "plain")):
        words = np.array(["the", "film", "was", "good", "slow", "bright", "a", "little", "long", "and", "never"])
        mark = " " if name.startswith("plain") else ", "
        texts = [mark.join(row) for row in words[random.integers(0, len(words), (PART_ROWS, 20))]]
        cities = np.array(["oslo", "rome", "bonn", "paris", "lima"])[random.integers(0, 5, PART_ROWS)]
        return pd.DataFrame(
            {"size": random.normal(size=PART_ROWS).round(4), "city": cities, "text": texts, "label": label}
        )
    values = random.normal(size=(PART_ROWS, len(NAMES)))
    frame = pd.DataFrame(values if name.startswith("digits") else values.round(6), columns=NAMES)
    return frame.assign(label=label)


def write(path: Path, megabytes: float) -> None:
    """Write a case as a file of about this size."""
    random = np.random.default_rng(0)
    if path.suffix == ".parquet":
        rows = max(1, round(megabytes * 1e6 / (8 * len(NAMES)) / PART_ROWS))
        frame = pd.concat([part(path.name, random) for _ in range(rows)])
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path)
        return
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            part(path.name, random).to_csv(file, index=False, header=not file.tell())


def readers(path: Path, cache: Path) -> dict[str, Callable[[], object]]:
    """Return what is compared: name -> reads the file once."""

    def onward() -> None:
        make_shards(DataConfig(source=str(path)), CASES[path.name], cache)

    if path.suffix == ".parquet":
        return {"onward": onward, "pandas": lambda: pd.read_parquet(path), "pyarrow": lambda: pq.read_table(path)}
    return {"onward": onward, "pandas": lambda: pd.read_csv(path), "pyarrow": lambda: csv.read_csv(path)}


def measure(path: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return reader -> (processor time, wall time) in each round, in seconds."""
    cache = path.parent / "cache"
    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for name, read in readers(path, cache).items():
            shutil.rmtree(cache, ignore_errors=True)
            os.utime(path)  # else Onward would remember the columns
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            read()
            if number:  # in the first round modules are imported
                times.setdefault(name, []).append((time.process_time() - cpu_s, time.perf_counter() - wall_s))
    return times


def line(path: Path, times: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return the figures of a case."""
    megabytes = path.stat().st_size / 1e6
    speeds = [megabytes / statistics.median(found) for each in times.values() for found in zip(*each, strict=True)]
    own = [cpu_s for cpu_s, _ in times["onward"]]
    text = f"{path.name:>15} {megabytes:>5.0f} MB " + " ".join(f"{speed:>7.0f}" for speed in speeds)
    for name in ("pandas", "pyarrow"):
        ratios = [mine / other for mine, (other, _) in zip(own, times[name], strict=True)]
        text += f"   {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return text


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", nargs="+", choices=list(CASES), default=list(CASES))
    given = parser.parse_args()
    print("MB/s of processor time and of wall time; processor time of Onward over that of pandas, of pyarrow")
    print(f"{'':>24} {'Onward':>13} {'pandas':>15} {'pyarrow':>17} {'over pandas':>17} {'over pyarrow':>22}")
    for name in given.files:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            write(path, given.megabytes)
            print(line(path, measure(path, given.rounds)), flush=True)


if __name__ == "__main__":
    main()
