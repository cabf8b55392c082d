"""Several sources with weights: exact proportions, every row equally often, computed from the position alone."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches import sample_stream
from onward.trainer.data.batches.sample_stream import SampleStream, shares
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.columns import ColumnType
from onward.trainer.data.schema.permutation import hash_key, keyed_hash, permutation
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.errors import ConfigError, DataError
from tests.support.shards import make_shards

MIXTURES = [((100, 50), (3.0, 1.0)), ((7, 11, 13), (1.0, 1.0, 5.0)), ((5, 200), (1.0, 1.0)), ((40, 40), (1.0, 1.0))]


def stream(sizes: tuple[int, ...], weights: tuple[float, ...], **settings: Any) -> SampleStream:
    return SampleStream(sizes, weights, **{"seed": 3, "shuffle": True, **settings})


@pytest.mark.parametrize(("sizes", "weights"), MIXTURES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_the_share_of_each_source_and_each_row_comes_equally_often(
    sizes: tuple[int, ...], weights: tuple[float, ...], shuffle: bool
) -> None:
    mixed = stream(sizes, weights, shuffle=shuffle)
    bounds = np.cumsum([0, *sizes])
    seen: Counter[int] = Counter()
    for epoch in range(5):
        rows = mixed.rows(np.arange(epoch * mixed.num_rows, (epoch + 1) * mixed.num_rows))
        of_source = np.histogram(rows, bounds)[0]
        assert of_source.tolist() == mixed.shares
        exact = sum(sizes) * np.array(weights) / sum(weights)
        assert (np.abs(of_source - exact) < 1).all()
        seen.update(rows.tolist())
        for first, last in itertools.pairwise(bounds.tolist()):
            counts = [seen[row] for row in range(first, last)]
            assert max(counts) - min(counts) <= 1


def test_one_source_is_the_permutation_of_each_epoch() -> None:
    positions = np.arange(50, 130)
    expected = [permutation(np.array([p % 50]), 50, seed=3, epoch=p // 50)[0] for p in positions.tolist()]
    assert stream((50,), (2.5,)).rows(positions).tolist() == expected
    assert stream((50,), (1.0,), shuffle=False).rows(positions).tolist() == (positions % 50).tolist()


def test_a_position_has_the_same_row_however_it_is_asked_for() -> None:
    mixed = stream((20, 30), (1.0, 3.0))
    whole = mixed.rows(np.arange(400))
    assert [mixed.rows(np.array([position]))[0] for position in range(400)] == whole.tolist()
    shuffled = np.random.default_rng(0).permutation(400)
    assert mixed.rows(shuffled).tolist() == whole[shuffled].tolist()


ORDERS = [
    ((100_003,), {}, "c0652292d5634654"),
    ((100_003,), {"block": 64}, "cc710e6685b94deb"),
    ((100_003,), {"block": 3000, "of_files": True}, "1a18b3ffa47557e9"),
    ((70_000, 30_003), {}, "77f672fafb9d05e9"),
    ((70_000, 30_003), {"block": 64}, "d9a6d4febbc12b9a"),
    ((70_000, 30_003), {"shuffle": False}, "f2b37a3c84a6bf4d"),
]
"""Sizes, settings, and a digest of rows that an earlier version computed, for each position by itself."""


@pytest.mark.parametrize(("sizes", "settings", "digest"), ORDERS)
def test_the_order_is_that_of_earlier_versions(sizes: tuple[int, ...], settings: dict[str, Any], digest: str) -> None:
    # a run that is resumed by a later version must take the same rows
    rows = stream(sizes, (3.0, 1.0)[: len(sizes)], **settings).rows(np.arange(90_000, 310_000))
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest().startswith(digest)


def plain_permutation(position: int, size: int, *parts: object) -> int:
    """Return where the shuffle puts a position: the Feistel network by its definition, of one number."""
    bits = max(1, -(-(size - 1).bit_length() // 2))
    left, right = divmod(position, 1 << bits)
    for number in range(6):
        hashed = int(keyed_hash(np.array([right]), hash_key("permutation", *parts, number))[0])
        left, right = right, left ^ (hashed >> (64 - bits))
    found = (left << bits) | right
    return found if found < size else plain_permutation(found, size, *parts)


def plain_row(position: int, size: int, block: int, seed: int) -> int:
    """Return the row at a position of a stream of one source, in blocks where `block` is not 0."""
    epoch, place = divmod(position, size)
    if not block:
        return plain_permutation(place, size, seed, epoch)
    window, inside = divmod(place, 256 * block)
    rows_of_window = min(256 * block, size - window * 256 * block)
    place = window * 256 * block + plain_permutation(inside, rows_of_window, seed, f"{epoch} window {window}")
    number, inside = divmod(place, block)
    if number < size // block:
        number = plain_permutation(number, size // block, seed, f"{epoch} blocks")
    shift = int(hash_key("first block", seed, epoch)) % size
    return (number * block + inside + shift) % size


@pytest.mark.parametrize("block", [0, 1, 7, 64])
def test_the_rows_of_chunks_are_those_of_each_position(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * 256 * 7 + 100
    # across the ends of chunks, of windows, and of epochs
    positions = np.r_[0:40, 250:270, 1780:1800, size - 40 : size + 40, 3 * size - 5 : 3 * size + 5]
    expected = [plain_row(position, size, block, 3) for position in positions.tolist()]
    for chunk in (sample_stream.CHUNK, 33):
        monkeypatch.setattr(sample_stream, "CHUNK", chunk)
        found = stream((size,), (1.0,), block=block)
        assert found.rows(positions).tolist() == expected
        backwards = [found.rows(positions[at : at + 9]) for at in range(0, len(positions), 9)][::-1]
        assert np.concatenate(backwards[::-1]).tolist() == expected


def test_epochs_and_seeds_differ_in_their_order() -> None:
    mixed = stream((20, 30), (1.0, 3.0))
    first, second = mixed.rows(np.arange(50)), mixed.rows(np.arange(50, 100))
    assert first.tolist() != second.tolist()
    assert first.tolist() != stream((20, 30), (1.0, 3.0), seed=4).rows(np.arange(50)).tolist()
    # neither source comes in one piece
    of_second = first >= 20
    assert 0 < of_second[:10].sum() < 10


def test_shares_add_up_and_are_off_by_less_than_one() -> None:
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(8, [3, 1]) == [6, 2]
    assert shares(1, [1, 1000]) == [0, 1]
    for total in range(1, 60):
        parts = shares(total, [0.3, 5, 1.7])
        assert sum(parts) == total
        assert all(abs(part - total * weight / 7) < 1 for part, weight in zip(parts, [0.3, 5, 1.7], strict=True))


def test_a_source_without_a_sample_in_an_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an epoch of 110 samples has none of source 2, whose weight 0.001"):
        stream((100, 10), (1.0, 0.001))


# -- in a configuration


def write(path: Path, first: int, count: int, *, extra: str = "") -> None:
    rows = [f"{n},{n % 4}{extra and ',1'}" for n in range(first, first + count)]
    path.write_text("\n".join([f"x,label{extra}", *rows]) + "\n")


def config(folder: Path, **data: Any) -> RunConfig:
    return build_config(
        {"model": {"path": folder / "model.onnx"}, "train": {"num_steps": 1}, "data": {"label": "label", **data}}
    )


def test_sources_are_sharded_one_after_the_other_with_their_own_held_out_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", 0, 40)
    write(tmp_path / "b.csv", 100, 20)
    (tmp_path / "config.toml").write_text(
        '[model]\npath = "m.onnx"\n[data]\nevaluation_fraction = 0.1\n[train]\nnum_steps = 1\n'
        '[[data.sources]]\nsource = "a.csv"\nweight = 3\n[[data.sources]]\nsource = "b.csv"\n'
    )
    mixed = load_config(tmp_path / "config.toml")
    assert [(source.source, source.weight) for source in mixed.data.sources] == [
        (str(tmp_path / "a.csv"), 3.0),
        (str(tmp_path / "b.csv"), 1.0),
    ]
    assert RunConfig.model_validate_json(mixed.model_dump_json()) == mixed
    changed = load_config(mixed, {"data.sources": [{"source": str(tmp_path / "b.csv")}]}.items())
    assert changed.data.source == str(tmp_path / "b.csv")
    columns = {"x": ColumnType("int64", ()), "label": ColumnType("int64", ())}
    directory, manifest, _ = make_shards(mixed.data, columns, tmp_path / "cache")
    assert manifest.sizes == (36, 18)
    train, held_out = open_shards(directory, "train"), open_shards(directory, "evaluation")
    assert train.sizes == (36, 18)
    xs = train.read(np.arange(54))["x"]
    assert (xs[:36] < 40).all()
    assert (xs[36:] >= 100).all()
    assert held_out.num_rows == 6
    swapped = mixed.data.model_copy(update={"sources": mixed.data.sources[::-1]})
    assert make_shards(swapped, columns, tmp_path / "cache")[1].key != manifest.key
    other_weights = tuple(source.model_copy(update={"weight": 1.0}) for source in mixed.data.sources)
    reweighted = mixed.data.model_copy(update={"sources": other_weights})
    assert make_shards(reweighted, columns, tmp_path / "cache")[1].key == manifest.key


def test_types_are_inferred_over_all_sources(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n1,0\n2,1\n")
    (tmp_path / "b.csv").write_text("x,label\n0.5,0\n70000,1\n")
    data = config(tmp_path, sources=[{"source": str(tmp_path / name)} for name in ("a.csv", "b.csv")]).data
    assert infer_schema(data)["x"].dtype == "float64"


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", 0, 40)
    write(tmp_path / "b.csv", 0, 40, extra=",more")
    sources = [{"source": str(tmp_path / "a.csv")}, {"source": str(tmp_path / "b.csv")}]
    with pytest.raises(DataError, match=r"a.csv and .*b.csv do not both have column more"):
        infer_schema(config(tmp_path, sources=sources).data)
    with pytest.raises(ConfigError, match="source and sources exclude each other"):
        config(tmp_path, source="other.csv", sources=sources)
    with pytest.raises(ConfigError, match=r"data.source is missing"):
        config(tmp_path)
    with pytest.raises(ConfigError, match=r"data.sources.0.weight: Input should be greater than 0"):
        config(tmp_path, sources=[{"source": "a.csv", "weight": 0}])
    with pytest.raises(ConfigError, match=r"data.sources.0.source"):
        config(tmp_path, sources=[{"weight": 1}])


# -- fewer rows to evaluate on


def test_a_limit_of_evaluation_rows_is_a_fixed_choice(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", 0, 100)
    data = config(tmp_path, source=str(tmp_path / "a.csv"), evaluation_fraction=0.5).data
    directory, _, _ = make_shards(data, {"x": ColumnType("int64", ())}, tmp_path / "cache")
    whole, few = open_shards(directory, "evaluation"), open_shards(directory, "evaluation", most=10)
    chosen = few.read(np.arange(10))["x"].tolist()
    assert few.num_rows == 10
    assert chosen == sorted(set(chosen))
    assert set(chosen) < set(whole.read(np.arange(50))["x"].tolist())
    assert open_shards(directory, "evaluation", most=10).read(np.arange(10))["x"].tolist() == chosen
    assert open_shards(directory, "evaluation", most=50).num_rows == whole.num_rows == 50
    assert open_shards(directory, "evaluation", most=1000).num_rows == 50
