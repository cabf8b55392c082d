"""train.shuffle = "blocks": each row once per epoch, from the position alone, in windows that are read ahead."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.batches import sample_stream
from onward.trainer.data.batches.sample_stream import SampleStream, permutation_in_blocks, rows_per_block
from onward.trainer.data.batches.shard_read_ahead import ShardReadAhead
from onward.trainer.data.storage import shards as shards_module
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Shards
from onward.trainer.run.machine import this_machine
from tests.bench.shard_reading import read_bytes
from tests.support.shards import make_shards


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_stream, "WINDOW_BLOCKS", 4)


def stream(size: int, block: int, seed: int = 3) -> SampleStream:
    return SampleStream([size], [1.0], seed=seed, shuffle=True, block=block)


@pytest.mark.parametrize(("size", "block"), [(1, 1), (7, 8), (64, 8), (100, 8), (1000, 1), (999, 16), (5, 2)])
def test_each_row_comes_once_in_each_epoch(size: int, block: int) -> None:
    rows = stream(size, block).rows(np.arange(3 * size))
    for epoch in range(3):
        assert sorted(rows[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


@pytest.mark.parametrize(("sizes", "weights"), [((100, 50), (3.0, 1.0)), ((7, 11, 130), (1.0, 1.0, 5.0))])
def test_mixed_sources_keep_their_shares(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    mixed = SampleStream(sizes, weights, seed=1, shuffle=True, block=8)
    seen: Counter[int] = Counter()
    for epoch in range(4):
        rows = mixed.rows(np.arange(epoch * mixed.num_rows, (epoch + 1) * mixed.num_rows))
        assert np.histogram(rows, np.cumsum([0, *sizes]))[0].tolist() == mixed.shares
        seen.update(rows.tolist())
    for first, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        counts = [seen[row] for row in range(first, first + size)]
        assert max(counts) - min(counts) <= 1


def test_a_position_has_the_same_row_however_it_is_asked_for() -> None:
    blocks = stream(500, 16)
    whole = blocks.rows(np.arange(1500))
    shuffled = np.random.default_rng(0).permutation(1500)
    assert blocks.rows(shuffled).tolist() == whole[shuffled].tolist()
    assert [blocks.rows(np.array([at]))[0] for at in range(0, 1500, 7)] == whole[::7].tolist()


def test_the_rows_of_a_window_are_those_of_a_few_blocks_in_no_order() -> None:
    rows = stream(64 * 100, 64).rows(np.arange(4 * 64))
    # four blocks, and the two ends of one that goes over the last row
    assert len(np.flatnonzero(np.diff(np.sort(rows)) > 1)) <= 4
    assert (np.diff(rows) == 1).mean() < 0.05
    # samples of all blocks come at any time
    assert len(set((rows[:40] // 64).tolist())) >= 4


def test_epochs_and_seeds_have_other_blocks_and_other_orders() -> None:
    first = stream(1000, 10).rows(np.arange(2000))
    assert first[:1000].tolist() != first[1000:].tolist()
    assert set(first[:40].tolist()) != set(first[1000:1040].tolist())
    assert first[:1000].tolist() != stream(1000, 10, seed=4).rows(np.arange(1000)).tolist()


def test_the_order_of_a_seed_is_that_of_earlier_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    # a run that is resumed by a later version must take the same rows
    found = permutation_in_blocks(np.arange(12), 12, 2, seed=7, epoch=0)
    assert found.tolist() == [7, 0, 8, 2, 6, 11, 1, 5, 3, 9, 10, 4]
    monkeypatch.setattr(sample_stream, "WINDOW_BLOCKS", 256)
    whole = permutation_in_blocks(np.arange(100_000), 100_000, 64, seed=0, epoch=1)
    assert whole[[0, 1, 2, 99_999]].tolist() == [16862, 79593, 34322, 70213]


def test_blocks_have_a_power_of_two_of_rows() -> None:
    assert rows_per_block(136 * 1000, 1000) == rows_per_block(136 * 1000 + 700, 1000) == 8192
    assert rows_per_block(10**9, 10) == 1
    assert rows_per_block(0, 0) == 1 << 20


# -- reading ahead


def random_shards(folder: Path, num_rows: int = 20_000) -> Shards:
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(num_rows, 32)).astype(np.float32), "label": random.integers(0, 9, num_rows)}
    np.savez(folder / "data.npz", **columns)
    data = DataConfig(source=str(folder / "data.npz"), rows_per_shard=3000)
    directory, _, _ = make_shards(data, None, folder / "cache")
    return open_shards(directory, "train")


def uncached(shards: Shards) -> None:
    """Drop the files of a split from the page cache."""
    for file in shards.manifest.train:
        with (shards._directory / file.name).open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("memory", [0.0, 0.5], ids=["larger", "fits"])
@pytest.mark.parametrize("block", [0, 64])
def test_what_is_read_ahead_changes_no_value(
    tmp_path: Path, memory: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "MEMORY_SHARE", memory)
    shards = random_shards(tmp_path)
    order = stream(shards.num_rows, block)
    positions = np.arange(2 * shards.num_rows)
    rows = order.rows(positions)
    expected = shards.read(rows)
    uncached(shards)
    again = Shards(shards._directory, shards.manifest, "train")
    ahead = ShardReadAhead(again, order)
    for first in range(0, len(positions), 4000):
        ahead.reach(first)
        found = again.read(rows[first : first + 4000])
        for name, values in found.items():
            np.testing.assert_array_equal(values, np.asarray(expected[name])[first : first + 4000])
    ahead.wait()
    ahead.close()


def test_each_window_is_read_once_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "MEMORY_SHARE", 0.0)
    shards = random_shards(tmp_path)
    order = stream(shards.num_rows, 64)
    asked: list[set[int]] = []

    def read_ahead_of(firsts: Any, count: int, is_over: object) -> None:
        asked.append({row for first in firsts.tolist() for row in range(first, first + count)})

    monkeypatch.setattr(shards, "read_ahead_of", read_ahead_of)
    ahead = ShardReadAhead(shards, order)
    positions = np.arange(2 * shards.num_rows)
    rows = order.rows(positions)
    missed = 0
    for first in range(0, len(positions), 50):
        ahead.reach(first)
        ahead.wait()
        # of this window and the next one, and of a step that reaches into the next one the one before
        missed += len(set(rows[first : first + 50].tolist()) - set().union(*asked[-3:]))
    ahead.close()
    windows = -(-shards.num_rows // order.window)
    assert len(asked) == 2 * windows + 1
    # in each epoch some of the block that goes over the last row of the data
    assert missed <= 2 * 64
    assert sum(map(len, asked)) <= 1.02 * len(positions) + order.window


def test_a_file_is_opened_by_its_heads_alone_where_nothing_around_is_read(tmp_path: Path) -> None:
    shards = random_shards(tmp_path)
    uncached(shards)
    again = Shards(shards._directory, shards.manifest, "train")
    again.reads_around = False
    before = read_bytes()
    again._reader(0)
    # Arrow would let the kernel read each buffer that it is asked for
    assert shards.manifest.train[0].bytes > 400_000
    assert read_bytes() - before <= 64 << 10


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MOST_OPEN", 2)
    shards = random_shards(tmp_path)
    for row in np.random.default_rng(0).integers(0, shards.num_rows, 50).tolist():
        shards.read(np.array([row]))
        assert len(shards._open) <= 2
    maps = Path("/proc/self/maps").read_text().count(str(shards._directory))
    assert maps <= 2 * 4
