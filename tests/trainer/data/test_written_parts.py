"""Shards that several processes write in parts are those of one process, byte for byte."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.config.sections.data import DataConfig, SourceConfig
from onward.trainer.config.sections.tables import TableConfig
from onward.trainer.data.formats import arrow_files, table_readers
from onward.trainer.data.images import image_sources
from onward.trainer.data.reading import source_parts
from onward.trainer.data.schema.columns import ColumnType
from onward.trainer.data.storage import part_processes, written_parts
from onward.trainer.data.storage.part_processes import PartProcesses
from onward.trainer.data.storage.recipe import Recipe, stored_columns
from onward.trainer.data.storage.shard_space import shard_bytes
from onward.trainer.data.storage.sharding import shard
from onward.trainer.data.storage.written_parts import PartMaker, PartStep, RunSteps, StepResult
from onward.trainer.errors import DataError, RuntimeUnavailable

BLOCK = 2000
"""Bytes of a block in these tests."""
FLOAT, LABEL, TEXT = ColumnType("float32", ()), ColumnType("int64", ()), ColumnType("str")
TABLE = {"x": FLOAT, "city": TEXT, "label": LABEL}
ALONE = PartProcesses(1)


class Shuffled:
    """Makes each step in this process, in any order and some of them twice."""

    most_parts = 1000

    def __init__(self) -> None:
        self.made: list[PartStep] = []

    def can_divide(self, recipe: Recipe) -> bool:
        return True

    def opened(self, maker: PartMaker) -> AbstractContextManager[RunSteps]:
        return nullcontext(partial(self._run, maker))

    def _run(self, maker: PartMaker, steps: Iterable[PartStep]) -> Iterator[tuple[int, StepResult]]:
        numbered = list(enumerate(steps))
        self.made += [step for _, step in numbered]
        random.Random(0).shuffle(numbered)
        again = numbered[:2]
        # another process opens the maker anew
        other = written_parts.open_maker(maker.folder)
        results = {number: other.make(step) for number, step in [*again, *numbered]}
        yield from results.items()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(written_parts, "PART_BYTES", 3 * BLOCK)
    monkeypatch.setattr(written_parts, "JOINED_BYTES", 5 * BLOCK)
    monkeypatch.setattr(table_readers, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(arrow_files, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(arrow_files, "RUN_BYTES", BLOCK)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def compare(folder: Path, data: DataConfig, columns: Mapping[str, ColumnType] | None, least: int = 4) -> None:
    """Compare the shards of one process with those of parts, of which there must be `least`."""
    recipe = Recipe(data, stored_columns(data, columns), ())
    runner = Shuffled()
    alone, _, _ = shard(recipe, folder / "alone", runner=ALONE)
    parts, _, _ = shard(recipe, folder / "parts", runner=runner)
    assert sum(step.part is not None for step in runner.made) >= least
    assert sum(step.join is not None for step in runner.made) >= 2
    expected = content(alone)
    found = content(parts)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def rows(count: int, seed: int = 0) -> list[tuple[float, str, int]]:
    generator = random.Random(seed)
    cities = ["oslo", "new york", "são paulo", 'a "quoted" one', "two\nlines", "with, comma"]
    return [(generator.gauss(0, 1), generator.choice(cities), number % 3) for number in range(count)]


def quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("kind", ["plain", "quoted", "windows"])
def test_csv(tmp_path: Path, kind: str, end: str) -> None:
    lines = ["x,city,label"]
    for x, city, label in rows(1500):
        cell = quoted(city) if kind == "quoted" else city.split(",")[0].replace('"', "").replace("\n", " ")
        lines.append(f"{x:.6f},{cell},{label}")
    lines.insert(700, "")
    separator = "\r\n" if kind == "windows" else "\n"
    mark = "\ufeff" if kind == "windows" else ""
    (tmp_path / "t.csv").write_text(mark + separator.join(lines) + end, newline="")
    compare(tmp_path, DataConfig(source=str(tmp_path / "t.csv"), rows_per_shard=64), TABLE)


def test_csv_without_a_header_and_rows_longer_than_a_block(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("w") as file:
        for number in range(300):
            size = 3 * BLOCK if number % 50 == 7 else number % 40
            file.write(f'{number},"{"long " * (size // 5)}"\n')
    data = DataConfig(source=str(tmp_path / "t.csv"), table=TableConfig(header=False), rows_per_shard=10)
    compare(tmp_path, data, {"c0": LABEL, "c1": TEXT})


@pytest.mark.parametrize("seed", range(6))
def test_csv_with_quotes_anywhere(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    with (tmp_path / "t.csv").open("w") as file:
        file.write("x,city,label\n")
        for x, city, label in rows(1500, seed):
            # some rows are bad: a stray quote may make one cell of several lines
            stray = generator.random() < 0.004
            cell = 'stray " quote' if stray else quoted(city)
            file.write(f"{x:.3f},{cell},{label}\n")
    data = DataConfig(source=str(tmp_path / "t.csv"), bad_rows="skip", rows_per_shard=50)
    compare(tmp_path, data, TABLE, least=1 if seed else 3)


def test_json_lines_whose_rows_vary(tmp_path: Path) -> None:
    with (tmp_path / "t.jsonl").open("w") as file:
        for number, (x, city, label) in enumerate(rows(800)):
            row = {"x": x, "city": city, "label": label, "v": list(range(number % 7))}
            file.write(("{" if number == 500 else json.dumps(row)) + "\n")
    data = DataConfig(source=str(tmp_path / "t.jsonl"), bad_rows="skip", rows_per_shard=33)
    compare(tmp_path, data, {**TABLE, "v": ColumnType("int64", (None,))})


def test_parquet_of_many_row_groups(tmp_path: Path) -> None:
    table = pa.table(
        {
            "x": [None if number % 97 == 3 else each[0] for number, each in enumerate(rows(3000))],
            "city": pa.array([each[1] for each in rows(3000)]).dictionary_encode(),
            "v": [[float(number)] * 3 for number in range(3000)],
            "label": np.arange(3000),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=110)
    pq.write_table(table.slice(0, 100), tmp_path / "b.parquet", row_group_size=9)
    data = DataConfig(source=str(tmp_path / "*.parquet"), bad_rows="skip", rows_per_shard=300)
    compare(tmp_path, data, {**TABLE, "v": ColumnType("float32", (3,))})


def test_many_small_files_of_several_sources_with_a_test(tmp_path: Path) -> None:
    for number in range(40):
        size = 30 + number
        np.savez(tmp_path / f"{'ab'[number % 2]}{number}.npz", x=np.arange(size * 2.0).reshape(size, 2))
    for name in ("held", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((50, 2)))
    sources = tuple(SourceConfig(source=str(tmp_path / f"{name}*.npz")) for name in "ab")
    data = DataConfig(
        sources=sources,
        source=sources[0].source,
        evaluation_source=str(tmp_path / "held.npz"),
        test_source=str(tmp_path / "test.npz"),
        rows_per_shard=17,
    )
    compare(tmp_path, data, {"x": ColumnType("float32", (2,))})


def test_a_stratified_split_divides_no_file(tmp_path: Path) -> None:
    for name in "abcd":
        lines = [f"{x:.6f},{label}" for x, _, label in rows(900, ord(name))]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,label", *lines]))
    data = DataConfig(source=str(tmp_path / "*.csv"), split="stratified", rows_per_shard=100)
    compare(tmp_path, data, {"x": FLOAT, "label": LABEL})


def test_a_stratified_split_of_class_folders_divides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (source_parts, image_sources):
        monkeypatch.setattr(module, "PART_ROWS", 16)
    for name in ("0", "1"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for at in range(100):
            (tmp_path / "images" / name / f"{at:03d}.jpg").write_bytes(bytes([at]) * BLOCK)
    settings = {"source": str(tmp_path / "images"), "image": {}, "rows_per_shard": 16}
    for number, split in enumerate(("random", "stratified")):
        (tmp_path / split).mkdir()
        data = DataConfig.model_validate({**settings, "split": split})
        compare(tmp_path / split, data, {"image": ColumnType("bytes"), "label": TEXT}, least=1 if number else 4)


def test_bad_rows_are_named_as_one_process_names_them(tmp_path: Path) -> None:
    lines = [f"{x:.6f},oslo,{label}" for x, _, label in rows(1500)]
    for at in (100, 700, 701, 1400):
        lines[at] = "?,oslo,1"
    lines[900] = "1,2"
    (tmp_path / "t.csv").write_text("\n".join(["x,city,label", *lines]))
    data = DataConfig(source=str(tmp_path / "t.csv"))
    recipe = Recipe(data, stored_columns(data, TABLE), ())
    messages = []
    for runner in (ALONE, Shuffled()):
        with pytest.raises(DataError) as caught:
            shard(recipe, tmp_path / "cache", runner=runner)
        messages.append(str(caught.value))
        assert list((tmp_path / "cache").iterdir()) == []
    assert messages[0] == messages[1]
    assert "t.csv, line 102: x is '?', not a number" in messages[0]
    assert "t.csv, line 902: has 2 fields, not 3" in messages[0]
    compare(tmp_path, data.model_copy(update={"bad_rows": "skip", "rows_per_shard": 100}), TABLE)


def test_the_error_of_the_first_part_is_raised(tmp_path: Path) -> None:
    lines = [json.dumps({f"key{number}": 1 for number in range(at * 3000, at * 3000 + 3000)}) for at in range(8)]
    (tmp_path / "t.jsonl").write_text("\n".join(['{"x": 1}', *lines]))
    data = DataConfig(source=str(tmp_path / "t.jsonl"), bad_rows="skip")
    recipe = Recipe(data, stored_columns(data, {"x": FLOAT}), ())
    messages = []
    for runner in (ALONE, Shuffled()):
        with pytest.raises(DataError) as caught:
            shard(recipe, tmp_path / "cache", runner=runner)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(("cores", "divided"), [(1, False), (2, False), (3, True)])
def test_one_process_is_enough_for_two_cores(
    tmp_path: Path, cores: int, divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("x\n1\n2\n")
    monkeypatch.setattr(part_processes, "usable_cores", lambda: cores)
    data = DataConfig(source=str(tmp_path / "t.csv"))
    recipe = Recipe(data, stored_columns(data, {"x": FLOAT}), ())
    assert written_parts.is_divided(recipe, PartProcesses()) is divided
    monkeypatch.setattr(written_parts, "LEAST_BYTES", 1000)
    assert not written_parts.is_divided(recipe, PartProcesses())


def test_one_process_is_enough_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("x\n1\n2\n")
    data = DataConfig(source=str(tmp_path / "t.csv"))
    recipe = Recipe(data, stored_columns(data, {"x": FLOAT}), ())
    monkeypatch.setattr(part_processes, "usable_cores", lambda: 8)
    for free, divided in ((8, True), (3, True), (2, False), (0, False)):
        # what the container leaves, which may be less than what the host has
        monkeypatch.setattr(part_processes, "free_host_memory", lambda free=free: free * part_processes.PROCESS_BYTES)
        assert written_parts.is_divided(recipe, PartProcesses()) is divided


def test_one_process_writes_where_shards_and_parts_do_not_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((3000, 8), np.float32))
    data = DataConfig(source=str(tmp_path / "t.npz"))
    recipe = Recipe(data, stored_columns(data, {"x": ColumnType("float32", (8,))}), ())
    size = shard_bytes(recipe)
    for free, divided in ((2 * size, True), (2 * size - 1, False), (size, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        runner = Shuffled()
        caplog.clear()
        shard(recipe, tmp_path / str(free), runner=runner)
        assert bool(runner.made) is divided
        assert ("written by this process alone" in caplog.text) is not divided


def test_a_process_that_was_taken_for_lost_and_still_writes_does_not_disturb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((3000, 8), np.float32))
    data = DataConfig(source=str(tmp_path / "t.npz"))
    recipe = Recipe(data, stored_columns(data, {"x": ColumnType("float32", (8,))}), ())
    alone, _, _ = shard(recipe, tmp_path / "alone", runner=ALONE)
    unlink = os.unlink

    def unlink_and_write(path: Any, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if path == "job.json":
            os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=dir_fd))

    monkeypatch.setattr(os, "unlink", unlink_and_write)
    parts, _, _ = shard(recipe, tmp_path / "parts", runner=Shuffled())
    assert content(parts) == content(alone)
    # a later job removes what is left
    (left,) = (tmp_path / "parts").glob(".*.partial")
    assert [path.name for path in left.iterdir()] == ["late"]


# -- other processes


def large_csv(folder: Path) -> Recipe:
    path = folder / "large.csv"
    values = np.random.default_rng(0).normal(size=(120_000, 8)).round(6)
    names = [f"f{number}" for number in range(8)]
    np.savetxt(path, values, "%.6f", ",", header=",".join(names), comments="")
    data = DataConfig(source=str(path), rows_per_shard=10_000)
    return Recipe(data, stored_columns(data, dict.fromkeys(names, FLOAT)), ())


def programs() -> list[psutil.Process]:
    """The processes that make parts for this one."""
    found = []
    for child in psutil.Process().children():
        with_arguments = child.cmdline() if child.status() != psutil.STATUS_ZOMBIE else []
        found += [child] * any("part_program" in word for word in with_arguments)
    return found


@pytest.fixture
def parts_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    # the blocks of other processes have their usual size, which cannot be changed from here
    for module in (table_readers, arrow_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 4 << 20)
    monkeypatch.setattr(written_parts, "PART_BYTES", 1 << 20)


@pytest.mark.usefixtures("parts_of_a_block")
def test_a_killed_process_is_replaced_and_its_part_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = large_csv(tmp_path)
    alone, _, _ = shard(recipe, tmp_path / "alone", runner=ALONE)
    ask = part_processes._answer
    killed: list[int] = []

    def kill_while_it_works(process: Any, step: PartStep) -> bytes:
        if not killed:
            killed.append(process.pid)
            threading.Timer(0.01, os.kill, (process.pid, signal.SIGKILL)).start()
        return ask(process, step)

    monkeypatch.setattr(part_processes, "_answer", kill_while_it_works)
    make = PartMaker.make

    def make_slowly(maker: PartMaker, step: PartStep) -> StepResult:
        # until the other process has got a part, and was killed
        while not killed:
            time.sleep(0.05)
        return make(maker, step)

    monkeypatch.setattr(PartMaker, "make", make_slowly)
    parts, _, _ = shard(recipe, tmp_path / "parts", runner=PartProcesses(2))
    assert content(parts) == content(alone)
    assert killed
    assert "a process that writes shards ended with status -9; another makes its part again" in caplog.text
    assert programs() == []


@pytest.mark.usefixtures("parts_of_a_block")
def test_this_process_writes_all_parts_where_no_other_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = large_csv(tmp_path)
    alone, _, _ = shard(recipe, tmp_path / "alone", runner=ALONE)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no module named onward >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(part_processes.sys, "executable", str(program))
    parts, _, _ = shard(recipe, tmp_path / "parts", runner=PartProcesses(2))
    assert content(parts) == content(alone)
    assert "by one process less, which does not start: no module named onward" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("parts_of_a_block")
def test_a_part_in_which_every_process_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    make = PartMaker.make

    def kill(process: Any, step: PartStep) -> bytes:
        process.kill()
        killed.set()
        return b""

    def make_slowly(maker: PartMaker, step: PartStep) -> StepResult:
        killed.wait(60)
        return make(maker, step)

    monkeypatch.setattr(part_processes, "_answer", kill)
    monkeypatch.setattr(part_processes, "MOST_DEATHS", 1)
    monkeypatch.setattr(PartMaker, "make", make_slowly)
    with pytest.raises(RuntimeUnavailable, match=r"1 processes ended in the same part of the data, .* status -9"):
        shard(large_csv(tmp_path), tmp_path / "cache", runner=PartProcesses(2))
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("parts_of_a_block")
def test_when_this_process_is_interrupted_the_others_end_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(maker: PartMaker, step: PartStep) -> StepResult:
        assert len(programs()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(PartMaker, "make", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shard(large_csv(tmp_path), tmp_path / "cache", runner=PartProcesses(3))
    assert programs() == []
    assert list((tmp_path / "cache").iterdir()) == []
