"""Rows whose labels a CTC cannot reach in their input length are bad rows; the others are batches with the lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.data_problems import data_problems
from onward.trainer.data.reading.inferred_schema import infer_schema
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.errors import ConfigError, DataError
from tests.equivalence.loss_cases import recogniser

GOOD = {"frames": [1, 2, 3, 4, 5], "symbols": [1, 2], "steps": 4}
REPEATED = {"frames": [1, 2, 3], "symbols": [1, 1], "steps": 3}


def config_of(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> RunConfig:
    (folder / "model.onnx").write_bytes(recogniser().SerializeToString())
    source = folder / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    return build_config(
        {
            "model": {"path": folder / "model.onnx"},
            "data": {"source": str(source), "evaluation_source": str(source), **sections.get("data", {})},
            "loss": {"name": "ctc", "label": "symbols", "input_lengths": "steps", **sections.get("loss", {})},
            "train": {"num_steps": 1},
        }
    )


def test_the_lengths_are_in_front_of_the_labels_of_a_batch(tmp_path: Path) -> None:
    config = config_of(tmp_path, [GOOD, REPEATED, {**GOOD, "symbols": [3]}])
    directory, manifest, _ = make_training_shards(config, tmp_path / "cache")
    assert data_problems(config, manifest.table, fitted=manifest.fitted) == []
    batch = one_batch(
        open_shards(directory, "train"), config, read_training_signature(config.model), np.array([2, 1, 0])
    )
    assert torch.equal(batch.labels[0], torch.tensor([[4, 3, -100], [3, 1, 1], [4, 1, 2]]))
    assert (batch.num_targets, batch.label_ranges) == ((3.0,), ((1, 3),)), "a length is no class"


BAD = {
    "its labels need 3 time steps (2 labels, of which 1 repeat the one before), but its input length (steps) is 2": {
        **REPEATED,
        "steps": 2,
    },
    "its input length (steps) is 0, but must be 1 or more": {**GOOD, "steps": 0},
    "a label is 0, which is loss.blank": {**GOOD, "symbols": [1, 0]},
    "the ignored label -100 is followed by others": {**GOOD, "symbols": [1, -100, 2]},
}


@pytest.mark.parametrize("why", BAD)
def test_a_row_that_cannot_be_reached_is_a_bad_row(why: str, tmp_path: Path) -> None:
    rows = [GOOD, BAD[why], GOOD, REPEATED]
    with pytest.raises(DataError) as refused:
        make_training_shards(config_of(tmp_path, rows), tmp_path / "cache")
    assert f"rows.jsonl, line 2: {why}" in refused.value.problems[0]
    assert not [path for path in (tmp_path / "cache").glob("*") if (path / "manifest.json").exists()]
    skipping = config_of(tmp_path, rows, data={"bad_rows": "skip"})
    _, manifest, _ = make_training_shards(skipping, tmp_path / "cache")
    assert (manifest.rows("train"), manifest.skipped) == (3, 2), "of the training rows and of those for evaluation"


def test_a_column_that_holds_no_lengths_is_refused(tmp_path: Path) -> None:
    for column, why in {
        "length": "loss.input_lengths reads column 'length', which the data does not have",
        "symbols": "loss.input_lengths",
        "share": "loss.input_lengths takes int64, but column 'share' holds float64",
    }.items():
        rows = [{**GOOD, "share": 0.5}, {**REPEATED, "share": 0.25}]
        config = config_of(tmp_path, rows, loss={"input_lengths": column})
        found = data_problems(config, infer_schema(config.data))
        assert any(why in problem for problem in found), (column, found)


def test_only_a_ctc_takes_input_lengths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss.input_lengths 'steps' is for ctc, not for cross_entropy"):
        config_of(tmp_path, [GOOD], loss={"name": "cross_entropy"})
