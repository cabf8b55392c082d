"""An empty list is a row like a shorter one: padded, counted as none, refused by row where a loss needs a target."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.loading import build_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.columns import Column, fit
from onward.trainer.data.schema.described_columns import infer, merge
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.sharding import make_training_shards
from onward.trainer.data.storage.shards import Shards
from onward.trainer.errors import DataError
from onward.trainer.model.losses.loss import Loss
from tests.support import graphs
from tests.support.images import encoded, picture

BOXES = [[0.5] * (5 * (row % 3)) for row in range(24)]
"""None, one or two boxes of five numbers."""
ROWS = [{"x": [0.1 * row, 1.0, 2.0, 3.0], "boxes": boxes} for row, boxes in enumerate(BOXES)]
FILE = """
def loss(output, labels):
    boxes = labels.reshape(len(labels), -1, 5)
    return output.square().sum() + boxes.clamp(min=0).sum()

def count(labels, size):
    return int((labels.reshape(len(labels), -1, 5)[..., 0] >= 0).sum())
"""


def jsonl(folder: Path) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder / "rows.jsonl"


def parquet(folder: Path) -> Path:
    pq.write_table(pa.table({name: [row[name] for row in ROWS] for name in ROWS[0]}), folder / "rows.parquet")
    return folder / "rows.parquet"


def arrow(folder: Path) -> Path:
    table = pa.table({name: [row[name] for row in ROWS] for name in ROWS[0]})
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as file:
        file.write_table(table)
    return folder / "rows.arrow"


def detector(folder: Path) -> Path:
    """y = x w, [N, 3]."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(np.full((4, 3), 0.5, np.float32), "w")],
    )
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), folder / "model.onnx"
    )
    (folder / "boxes.py").write_text(FILE)
    return folder / "model.onnx"


def sharded(folder: Path, source: Path, **sections: Any) -> tuple[RunConfig, Shards]:
    model = detector(folder)
    if other := sections.pop("graph_proto", None):
        onnx.save(other, model)
    own = {"file": f"{folder / 'boxes.py'}:loss", "count": "count"}
    config = build_config(
        {
            "model": {"path": model},
            "data": {"source": str(source), "label": "boxes", "evaluation_fraction": 0.25}
            | {"pad_values": {"boxes": -1.0}}
            | sections.pop("data", {}),
            "loss": own,
            "train": {"num_steps": 1, "global_batch_size": 4, "shuffle": False},
            **sections,
        }
    )
    directory, _, _ = make_training_shards(config, folder / "cache")
    return config, open_shards(directory, "train")


@pytest.mark.parametrize("source", [jsonl, parquet, arrow])
def test_empty_lists_are_rows_that_are_padded_and_counted_as_none(source, tmp_path):
    config, train = sharded(tmp_path, source(tmp_path))
    column = train.columns["boxes"]
    assert (column.variable, column.shape) == (True, (10,))
    stored = train.read(np.arange(train.num_rows))["boxes"]
    lengths = [len(row) for row in stored]
    assert sorted(set(lengths)) == [0, 5, 10]
    # every row of the source is there: a quarter is kept for evaluation
    [manifest] = (tmp_path / "cache").glob("*/manifest.json")
    assert train.num_rows + open_shards(manifest.parent, "evaluation").num_rows == len(ROWS)
    signature = read_training_signature(config.model)
    numbers = np.arange(6)
    batch = one_batch(train, config, signature, numbers)
    [labels] = batch.labels
    assert labels.shape == (6, max(lengths[:6]))
    for row, length in zip(labels, lengths, strict=False):
        assert row[:length].tolist() == [0.5] * length
        assert row[length:].tolist() == [-1.0] * (len(row) - length)
    assert batch.num_targets == (sum(lengths[:6]) / 5,)


def test_images_of_a_tar_file_without_boxes_are_rows(tmp_path):
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        for at, boxes in enumerate(BOXES):
            contents = {"jpg": encoded(picture(at, 16, 16)), "json": json.dumps({"boxes": boxes}).encode()}
            for kind, content in contents.items():
                info = tarfile.TarInfo(f"{at:04d}.{kind}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    sections = {"data": {"image": {}}, "graph_proto": graphs.tiny_conv_net(image_size=16)}
    config, train = sharded(tmp_path, tmp_path / "rows.tar", **sections)
    lengths = [len(row) for row in train.read(np.arange(train.num_rows))["boxes"]]
    assert sorted(set(lengths)) == [0, 5, 10]
    batch = one_batch(train, config, read_training_signature(config.model), np.arange(6))
    assert batch.num_targets == (sum(lengths[:6]) / 5,)


def test_a_batch_of_empty_rows_has_labels_without_values_and_counts_none(tmp_path):
    config, train = sharded(tmp_path, jsonl(tmp_path))
    empty = [at for at, row in enumerate(train.read(np.arange(train.num_rows))["boxes"]) if not len(row)]
    batch = one_batch(train, config, read_training_signature(config.model), np.array(empty[:3]))
    [labels] = batch.labels
    assert (labels.shape, batch.num_targets) == ((3, 0), (0.0,))
    assert labels.dtype == torch.float32


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "bce_with_logits"])
def test_a_loss_that_needs_a_target_of_every_row_refuses_the_rows_that_have_none(name, tmp_path):
    source = tmp_path / "rows.jsonl"
    rows = [{"x": [0.5] * (at % 5), "t": [0.25] * (at % 5)} for at in range(25)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "T"])],
        [numpy_helper.from_array(np.full(1, 0.5, np.float32), "w")],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    sections = {"loss": {"name": name}, "data": {"label": "t", "pad_values": {}}, "graph_proto": model}
    with pytest.raises(DataError, match=rf"line 1: t is empty, and the loss {name} needs a target of every row") as bad:
        sharded(tmp_path, source, **sections)
    assert "5 bad rows" in str(bad.value)
    _, train = sharded(tmp_path, source, **sections | {"data": sections["data"] | {"bad_rows": "skip"}})
    assert sorted({len(row) for row in train.read(np.arange(train.num_rows))["t"]}) == [1, 2, 3, 4]


def test_a_loss_of_a_fixed_number_of_targets_refuses_the_rows_that_have_none_by_their_shape(tmp_path):
    rows = [row | {"boxes": [0.25] * (3 if at % 5 else 0)} for at, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"line 1: boxes has shape \[0\], not \[3\]"):
        sharded(tmp_path, tmp_path / "rows.jsonl", loss={"name": "mse"})


def test_ctc_and_cross_entropy_take_rows_without_labels_with_the_value_by_hand():
    scores = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    likelihoods = scores.log_softmax(-1)
    ctc = LossConfig(name="ctc", label="label", blank=0, ignore_index=-100)
    labels = torch.full((3, 1), -100)
    # no label: every step must be blank
    value = Loss(ctc, ("y",))(scores, labels, 3)
    assert float(value) == pytest.approx(float(-likelihoods[:, :, 0].sum()), rel=1e-6)
    entropy = LossConfig(name="cross_entropy", label="label", ignore_index=-100)
    classes = torch.tensor([[-100, -100, -100, -100, -100], [1, 2, -100, -100, -100], [-100] * 5])
    value = Loss(entropy, ("y",))(scores, classes, 3)
    assert float(value) == pytest.approx(float(-(likelihoods[1, 0, 1] + likelihoods[1, 1, 2])), rel=1e-6)
    assert float(Loss(entropy, ("y",)).count(classes, 3)) == 2


def test_an_empty_list_changes_the_type_of_no_other_row():
    large = 2**53 + 1  # float64 would round it
    column = Column(name="ids", dtype="int64", shape=(2,), variable=True)
    rows, bad = fit([[large, 1], [], [large]], column)
    assert not bad
    assert [row.tolist() for row in rows] == [[large, 1], [], [large]]
    assert {row.dtype for row in rows} == {np.dtype("int64")}
    assert infer("ids", [[large, 1], [], [large]]).dtype == "int64"
    first = infer("ids", [[], []])
    assert merge(first, column).dtype == merge(column, first).dtype == "int64"
    assert merge(first, column).variable


def test_rows_that_are_no_lists_stay_bad():
    column = Column(name="boxes", dtype="float64", shape=(5,), variable=True)
    _, bad = fit([[], None, [[1.0, 2.0]], "x"], column)
    assert list(bad) == [1, 2, 3]
    _, bad = fit([[1.0, 2.0], []], Column(name="x", dtype="float64", shape=(2,)))
    assert bad == {1: "has shape [0], not [2]"}
