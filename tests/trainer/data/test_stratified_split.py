"""A stratified split holds out the same share of each class, exact to a row, whatever is read and however."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.trainer.config.loading import load_config
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.reading import sources
from onward.trainer.data.schema.columns import ColumnType
from onward.trainer.errors import ConfigError, DataError
from tests.support.images import write_classes
from tests.support.shards import make_shards

COUNTS = {"1": 600, "2": 60, "3": 20}
"""Class -> its rows; the classes are mixed by a generator."""


def table(folder: Path, *, more: int = 0, seed: int = 0) -> Path:
    labels = [name for name, count in COUNTS.items() for _ in range(count)]
    labels = np.random.default_rng(seed).permutation(labels).tolist() + ["3"] * more
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("x", "kind"), *([at / 2, label] for at, label in enumerate(labels))])
    return folder / "t.csv"


def held(source: Path, names: list[str] | None, text: tuple[str, ...] = (), **settings: Any) -> Any:
    data = DataConfig(source=str(source), label="kind", split="stratified", **settings)
    blocks = list(sources.read(data, names, text))
    assert names is None or all(block.cells.keys() <= set(names) for block, _ in blocks)
    return np.concatenate([each for _, each in blocks])


def labels_of(path: Path) -> Any:
    return np.array([line.split(",")[1] for line in path.read_text().split()[1:]])


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.6])
def test_each_class_has_its_share_to_a_row(fraction: float, tmp_path: Path) -> None:
    path = table(tmp_path)
    found = Counter(labels_of(path)[held(path, None, evaluation_fraction=fraction)])
    for name, count in COUNTS.items():
        assert abs(found[name] - fraction * count) <= 1, found


def test_the_same_rows_are_held_out_whatever_columns_are_read_as_numbers_or_as_text(tmp_path: Path) -> None:
    path = table(tmp_path)
    first = held(path, None)
    for names, text in ((["x"], ()), (["kind"], ("kind",)), (["x", "kind"], ()), (["x", "kind"], ("kind",))):
        np.testing.assert_array_equal(held(path, names, text), first)


def test_appended_rows_move_none_to_the_other_side(tmp_path: Path) -> None:
    before = held(table(tmp_path), None)
    np.testing.assert_array_equal(held(table(tmp_path, more=50), None)[: len(before)], before)


def test_a_random_split_of_the_same_table_is_another(tmp_path: Path) -> None:
    path = table(tmp_path)
    random = np.concatenate([each for _, each in sources.read(DataConfig(source=str(path)), None)])
    assert not np.array_equal(random, held(path, None))


def test_shards_have_the_split_and_a_key_of_their_own(tmp_path: Path) -> None:
    path = table(tmp_path)
    columns = {"x": ColumnType("float32", ()), "kind": ColumnType("int64", ())}
    rows = {}
    for split in ("random", "stratified"):
        data = DataConfig(source=str(path), label="kind", split=split)
        folder, manifest, was_there = make_shards(data, columns, tmp_path / "cache")
        assert not was_there
        rows[split] = folder, manifest.rows("evaluation")
    assert rows["random"][0] != rows["stratified"][0]
    assert abs(rows["stratified"][1] - 68) <= 3


def test_folders_of_images_are_divided_class_by_class(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "photos", each=40)
    data = DataConfig.model_validate({"source": str(source), "image": {}, "split": "stratified"})
    found = Counter[str]()
    for block, is_held in sources.read(data, None):
        found.update(np.asarray(block.cells["label"])[is_held].tolist())
    assert set(found.values()) == {4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label": ["a", "b"]}, "needs one column of classes to divide, but label has 2 columns; remove split"),
        ({"evaluation_source": "other.csv"}, "but evaluation_source has the rows for evaluation; remove split"),
        ({"table": {"window": {"length": 4}}}, r"but table\.window divides series by time, or by series; remove split"),
    ],
)
def test_what_has_no_classes_to_divide_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"model": {"path": "m"}, "data": {"source": "x", "split": "stratified", **settings}})


def test_a_label_that_is_absent_or_no_class_is_refused_with_its_name(tmp_path: Path) -> None:
    path = table(tmp_path)
    with pytest.raises(DataError, match=r"has no column 'sort' \(data\.label\) whose classes it divides"):
        list(sources.read(DataConfig(source=str(path), label="sort", split="stratified"), None))
    np.savez(tmp_path / "t.npz", kind=np.ones((9, 3)))
    with pytest.raises(DataError, match=r"column 'kind' of .* holds several numbers in a row, not a class"):
        held(tmp_path / "t.npz", None)
