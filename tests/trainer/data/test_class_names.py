"""Labels that are names become class ids: in the order that is given, else sorted as torchvision's ImageFolder does."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.schema.fitted import describe_classes
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import DataError

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
classifier (float[batch, 2] features) => (float[batch, 4] logits)
<float[2, 4] weight = {0, 0, 0, 0, 0, 0, 0, 0}>
{
    logits = MatMul (features, weight)
}
"""
NAMES = ["dog", "cat", "cow"]


def labelled(folder: Path, labels: Any, *, form: str = "csv", **data: Any) -> RunConfig:
    """Return a configuration of a classifier of 4 classes on rows with these labels; `a` is the row's number."""
    onnx.save(onnx.parser.parse_model(MODEL), folder / "model.onnx")
    rows = [{"f0": number, "f1": 2 * number} for number in range(len(labels))]
    source = folder / f"data.{form}"
    if form == "csv":
        with source.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*rows[0], "label"])
            writer.writerows([*row.values(), label] for row, label in zip(rows, labels, strict=True))
    elif form == "parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        pq.write_table(pa.table({**columns, "label": labels}), source)
    else:
        lines = [json.dumps({**row, "label": label}) for row, label in zip(rows, labels, strict=True)]
        source.write_text("\n".join(lines))
    settings = {"source": str(source), "evaluation_fraction": 0.25, "inputs": {"features": list(rows[0])}}
    return build_config({"model": {"path": folder / "model.onnx"}, "data": settings | data, "train": {"num_steps": 1}})


def sharded(config: RunConfig, folder: Path) -> tuple[ShardManifest, dict[int, int]]:
    """Return the manifest, and number of the row -> class id, over both splits."""
    directory, manifest, _ = make_training_shards(config, folder / "cache")
    ids: dict[int, int] = {}
    for split in ("train", "evaluation"):
        shards = open_shards(directory, split)  # type: ignore[arg-type]
        rows = shards.read(np.arange(shards.num_rows))
        assert shards.fitted == manifest.fitted
        ids |= dict(zip(np.asarray(rows["f0"]).tolist(), np.asarray(rows["label"]).tolist(), strict=True))
    return manifest, ids


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_names_are_found_over_all_rows_and_sorted_and_the_summary_says_so(tmp_path: Path, form: str) -> None:
    labels = [NAMES[number % 3] for number in range(40)]
    labels[39] = "ant"  # in one row only, whichever split that is in
    config = labelled(tmp_path, labels, form=form)
    assert check_files_and_data(dict(config)) == []
    manifest, ids = sharded(config, tmp_path)
    order = sorted({*NAMES, "ant"})
    assert manifest.fitted["label"].classes == tuple(order)
    assert ids == {number: order.index(label) for number, label in enumerate(labels)}
    assert manifest.preprocessing == (
        "classes of label: 0 = ant, 1 = cat, 2 = cow, 3 = dog, in the order of their names (data.classes "
        "sets another order)"
    )
    assert manifest.table["label"].extremes == (0, 1, 2, 3)
    assert data_problems(config, manifest.table, fitted=manifest.fitted) == []
    first = read_first_rows(config, read_training_signature(config.model), 8)
    assert first.fitted == manifest.fitted
    assert np.asarray(first.read(np.arange(8))["label"]).dtype == np.int64


def test_names_that_are_given_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    labels = [f" {NAMES[number % 3]}" for number in range(40)]
    manifest, ids = sharded(labelled(tmp_path, labels, classes=NAMES), tmp_path)
    assert ids == {number: number % 3 for number in range(40)}
    assert not manifest.fitted["label"].sorted_by_name
    assert describe_classes("label", manifest.fitted["label"]) == "classes of label: 0 = dog, 1 = cat, 2 = cow"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_integers_are_ids_unless_they_are_said_to_be_names(tmp_path: Path, form: str) -> None:
    labels = [(10, 3, 5)[number % 3] for number in range(40)]
    config = labelled(tmp_path, labels, form=form)
    assert "must be 0..3" in " ".join(check_files_and_data(dict(config)))
    for folder, classes in (("sorted", "sorted"), ("given", ["3", "5", "10"])):
        (tmp_path / folder).mkdir()
        manifest, ids = sharded(labelled(tmp_path / folder, labels, form=form, classes=classes), tmp_path)
        assert manifest.fitted["label"].classes == ("3", "5", "10")
        assert ids == {number: (2, 0, 1)[number % 3] for number in range(40)}


def test_booleans_are_false_and_true(tmp_path: Path) -> None:
    labels = [number % 3 == 0 for number in range(40)]
    _, plain = sharded(labelled(tmp_path, labels, form="parquet"), tmp_path)
    manifest, named = sharded(labelled(tmp_path, labels, form="parquet", classes="sorted"), tmp_path)
    assert manifest.fitted["label"].classes == ("false", "true")
    assert plain == named == {number: int(label) for number, label in enumerate(labels)}


def test_booleans_of_a_text_file_are_named_as_it_has_them(tmp_path: Path) -> None:
    labels = [number != 5 for number in range(40)]
    config = labelled(tmp_path, labels, classes=["True", "maybe"])
    with pytest.raises(DataError, match=r"line 7: label is 'False', which is none of the 2 classes True, maybe"):
        sharded(config, tmp_path)


def test_more_names_than_classes_are_refused_before_anything_starts_and_for_all_rows(tmp_path: Path) -> None:
    labels = [f"name {number:04d}" for number in range(40)]
    config = labelled(tmp_path, labels)
    assert "40 class names for column 'label'" in (problem := check_files_and_data(dict(config))[0])
    assert "has 4 classes" in problem
    manifest, _ = sharded(config, tmp_path)
    assert "40 class names" in data_problems(config, manifest.table, fitted=manifest.fitted)[0]
    given = labelled(tmp_path, labels, classes=labels)
    assert check_files_and_data(dict(given))[0].startswith("data.classes has 40 class names")


def test_unknown_and_missing_names_are_bad_rows_with_their_lines(tmp_path: Path) -> None:
    labels = [NAMES[number % 3] for number in range(40)]
    labels[5], labels[17] = "", "cwo"
    config = labelled(tmp_path, labels, classes=NAMES)
    with pytest.raises(DataError) as refused:
        sharded(config, tmp_path)
    assert any("line 7: label is missing" in problem for problem in refused.value.problems)
    assert any("line 19: label is 'cwo', which is none of the 3 classes" in each for each in refused.value.problems)
    skipping = labelled(tmp_path, labels, classes=NAMES, bad_rows="skip")
    manifest, ids = sharded(skipping, tmp_path)
    assert manifest.skipped == 2
    assert ids == {number: number % 3 for number in range(40) if number not in (5, 17)}


def test_names_that_fit_nowhere_are_refused_by_the_first_rows(tmp_path: Path) -> None:
    config = labelled(tmp_path, [NAMES[number % 3] for number in range(40)], classes=["a", "b"])
    assert "none of the 2 classes a, b (and for all of the first rows)" in check_files_and_data(dict(config))[0]
    integers = labelled(tmp_path, [number % 3 for number in range(40)], form="parquet", classes=["cat", "dog"])
    assert "holds integers, but data.classes is cat, dog" in check_files_and_data(dict(integers))[0]


def test_a_regression_takes_no_names(tmp_path: Path) -> None:
    config = labelled(tmp_path, [NAMES[number % 3] for number in range(40)])
    config = config.model_copy(update={"model": config.model.model_copy(update={"loss": "mse"})})
    assert "only a cross-entropy takes class names" in " ".join(check_files_and_data(dict(config)))
