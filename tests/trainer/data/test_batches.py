"""Batches are what the graph takes: its order, its types, padded, stacked; prepared in the background."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batches, evaluation_batches
from onward.trainer.data.input_columns import InputColumns
from onward.trainer.data.schema.signature import Signature, read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Shards
from onward.trainer.errors import ConfigError, DataError
from onward.trainer.onnx_import.driver import to_module
from tests.support import graphs
from tests.support.shards import make_shards

CPU = torch.device("cpu")


class Prepared:
    """A configuration and its shards."""

    def __init__(self, folder: Path, graph: onnx.ModelProto, source: Path, **sections: Any) -> None:
        onnx.save(graph, folder / "model.onnx")
        raw = {
            "model": {"path": folder / "model.onnx", **sections.get("model", {})},
            "data": {"source": str(source), **sections.get("data", {})},
            "train": {"global_batch_size": 8, "num_epochs": 1, "shuffle": False} | sections.get("train", {}),
            "parallel": sections.get("parallel", {}),
        }
        self.config: RunConfig = build_config(raw)
        columns = InputColumns(self.config.data, self.config.loss, self.config.model, self.signature).to_read()
        self.directory, _, _ = make_shards(self.config.data, columns, folder / "cache")

    @property
    def signature(self) -> Signature:
        return read_training_signature(self.config.model)

    @property
    def train(self) -> Shards:
        return open_shards(self.directory, "train")

    def batches(self, **share: Any) -> Batches:
        return Batches(
            self.train, self.config, self.signature, **{"replica": 0, "num_replicas": 1, "device": CPU, **share}
        )

    def evaluation(self, **share: Any) -> Iterator[Any]:
        split = open_shards(self.directory, "evaluation")
        share = {"replica": 0, "num_replicas": 1, "device": CPU, **share}
        return evaluation_batches(split, self.config, self.signature, **share)


@pytest.fixture
def images(tmp_path: Path) -> Callable[..., Prepared]:
    def prepare(**sections: Any) -> Prepared:
        image = np.arange(50 * 192, dtype=np.uint8).reshape(50, 3, 8, 8)
        np.savez(tmp_path / "images.npz", image=image, label=np.arange(50, dtype=np.int16) % 4)
        return Prepared(tmp_path, graphs.tiny_conv_net(), tmp_path / "images.npz", **sections)

    return prepare


def test_bytes_become_the_floats_the_graph_takes_and_labels_int64(images: Callable[..., Prepared]) -> None:
    prepared = images()
    (batch,) = prepared.batches().take(0, 8)
    (image,), (labels,) = batch.inputs, batch.labels
    assert (image.dtype, image.shape, labels.dtype, batch.size) == (torch.float32, (8, 3, 8, 8), torch.int64, 8)
    np.testing.assert_array_equal(image.numpy(), prepared.train.read(batch.rows)["image"])


@pytest.mark.parametrize("half", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_inputs_in_half_precision_are_fed_in_fp32_as_the_graph_is_computed(half: int, tmp_path: Path) -> None:
    model = graphs.tiny_mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = half
    for tensor in model.graph.initializer:
        kind = helper.tensor_dtype_to_np_dtype(half)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))
    np.savez(tmp_path / "rows.npz", features=np.ones((40, 4), np.float32), label=np.zeros(40, np.int64))
    (batch,) = Prepared(tmp_path, model, tmp_path / "rows.npz").batches().take(0, 8)
    assert batch.inputs[0].dtype == torch.float32
    assert to_module(model)(*batch.inputs).shape == (8, 1)


def test_several_columns_become_one_vector_in_the_order_given(tmp_path: Path) -> None:
    rows = np.arange(200).reshape(40, 5)
    (tmp_path / "t.csv").write_text("a,b,c,d,y\n" + "\n".join(",".join(map(str, row)) for row in rows))
    prepared = Prepared(
        tmp_path,
        graphs.tiny_mlp(),
        tmp_path / "t.csv",
        model={"loss": "mse"},
        data={"inputs": {"features": ["d", "a", "b", "c"]}, "label": "y"},
    )
    (batch,) = prepared.batches().take(0, 8)
    first = batch.inputs[0][0].tolist()
    assert batch.inputs[0].shape == (8, 4)
    assert first == [first[1] + 3, first[1], first[1] + 1, first[1] + 2]
    assert (batch.labels[0].dtype, float(batch.labels[0][0])) == (torch.float32, first[1] + 4)


def test_rows_of_varying_length_are_filled_up_with_the_values_asked_for(tmp_path: Path) -> None:
    lines = [{"input_ids": [1] * n, "attention_mask": [1] * n, "label": n % 3} for n in (2, 5, 3, 4) * 10]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prepared = Prepared(tmp_path, graphs.tiny_bert(), tmp_path / "t.jsonl", data={"pad_values": {"input_ids": 9}})
    (batch,) = prepared.batches().take(0, 8)
    ids, mask = batch.inputs
    assert ids.shape == mask.shape == (8, 5)
    assert torch.equal(ids, torch.where(mask == 1, 1, 9))
    lengths = [len(row) for row in prepared.train.read(batch.rows)["input_ids"]]
    assert mask.sum(1).tolist() == lengths


def test_labels_of_varying_length_are_filled_up_with_what_does_not_count(tmp_path: Path) -> None:
    lines = [{"input_ids": [1] * n, "label": [2] * n} for n in (2, 5, 3, 4) * 10]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model = graphs.tiny_transformer()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "sequence"
    prepared = Prepared(tmp_path, model, tmp_path / "t.jsonl", model={"ignore_index": -1})
    (batch,) = prepared.batches().take(0, 8)
    assert torch.equal(batch.labels[0], torch.where(batch.inputs[0] == 1, 2, -1))


def test_a_graph_with_its_own_loss_gets_no_labels_but_its_inputs_in_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", labels=np.arange(40) % 3, features=np.ones((40, 4), np.float32))
    prepared = Prepared(tmp_path, graphs.tiny_loss_model(), tmp_path / "t.npz", model={"loss": "output"})
    (batch,) = prepared.batches().take(0, 8)
    assert batch.labels == (None,)
    assert [(x.dtype, x.shape) for x in batch.inputs] == [(torch.float32, (8, 4)), (torch.int64, (8,))]


def test_without_shuffling_rows_are_in_order_of_the_data(images: Callable[..., Prepared]) -> None:
    batches = images().batches()
    assert batches.rows(40, 10).tolist() == [40, 41, 42, 43, 44, 0, 1, 2, 3, 4]


def test_prepared_batches_equal_batches_made_on_demand(images: Callable[..., Prepared]) -> None:
    prepared = images(train={"shuffle": True, "global_batch_size": 16, "num_epochs": 2})
    ahead, cold = prepared.batches(), prepared.batches()
    for position, count in [(0, 16), (16, 16), (16, 16), (0, 16), (16, 16), (32, 13), (80, 10)]:
        (got,) = ahead.take(position, count)
        cold._next = None
        (wanted_batch,) = cold.take(position, count)
        assert got.rows.tolist() == wanted_batch.rows.tolist()
        assert torch.equal(got.inputs[0], wanted_batch.inputs[0])
    ahead.close()
    cold.close()


def test_an_error_in_the_background_is_raised_by_the_step_that_needs_it(images: Callable[..., Prepared]) -> None:
    prepared = images(data={"rows_per_shard": 8})
    batches = prepared.batches()
    shard = prepared.directory / "train-00001.arrow"
    shard.write_bytes(b"damaged!")
    batches.take(0, 8)
    with pytest.raises(DataError, match=r"train-00001\.arrow cannot be read"):
        batches.take(8, 8)
    batches.close()


def test_shards_without_the_columns_of_the_model_are_refused(images: Callable[..., Prepared], tmp_path: Path) -> None:
    prepared = images()
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="the shards have no column features, only image, label"):
        prepared.batches()


def test_evaluation_batches_end_with_a_smaller_one(images: Callable[..., Prepared]) -> None:
    prepared = images(data={"evaluation_fraction": 0.26}, train={"evaluation_batch_size": 5})
    assert [batch.size for batch in prepared.evaluation()] == [5, 5, 3]


def shares(batches: list[list[Any]]) -> list[list[tuple[int, bool, int]]]:
    """For each replica, (samples, idle, group) of each micro-batch."""
    return [[(batch.size, batch.is_padding, batch.group) for batch in mine] for mine in batches]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (12, [[(2, False, 0), (2, False, 0)]] * 3),  # a whole global batch
        (11, [[(2, False, 0), (1, False, 1)], [(2, False, 0), (2, False, 1)], [(2, False, 0), (2, False, 1)]]),
        (7, [[(2, False, 0), (1, True, 1)], [(2, False, 0), (1, True, 1)], [(2, False, 0), (1, False, 1)]]),
        (6, [[(2, False, 0)]] * 3),
        (2, [[(1, True, 1)], [(1, False, 1)], [(1, False, 1)]]),
    ],
)
def test_every_replica_has_the_same_number_of_micro_batches_in_an_incomplete_step(
    count: int, expected: Any, images: Callable[..., Prepared]
) -> None:
    prepared = images(train={"global_batch_size": 12, "gradient_accumulation_steps": 2}, parallel={"data": 3})
    taken = [prepared.batches(replica=replica, num_replicas=3).take(0, count) for replica in range(3)]
    assert shares(taken) == expected
    rows = [row for mine in taken for batch in mine if not batch.is_padding for row in batch.rows.tolist()]
    assert rows == prepared.batches().rows(0, count).tolist()


def test_every_replica_has_the_same_number_of_evaluation_batches(images: Callable[..., Prepared]) -> None:
    prepared = images(data={"evaluation_fraction": 0.2}, train={"evaluation_batch_size": 3})
    split = [list(prepared.evaluation(replica=replica, num_replicas=3)) for replica in range(3)]
    assert shares(split) == [
        [(3, False, 0), (1, True, 1)],
        [(3, False, 0), (1, True, 1)],
        [(3, False, 0), (1, False, 1)],
    ]
    assert sorted(row for mine in split for batch in mine if not batch.is_padding for row in batch.rows) == list(
        range(10)
    )


def texts(folder: Path, lengths: list[int], **sections: Any) -> Prepared:
    lines = [{"input_ids": [1] * n, "attention_mask": [1] * n, "label": n % 3} for n in lengths]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Prepared(folder, graphs.tiny_bert(), folder / "t.jsonl", **sections)


def test_micro_batches_of_one_pipeline_run_are_padded_alike(tmp_path: Path) -> None:
    train = {"global_batch_size": 8, "gradient_accumulation_steps": 4}
    longest = []
    for ranks in (1, 2):
        prepared = texts(tmp_path, list(range(1, 16)) * 4, train=train, parallel={"pipeline": ranks})
        taken = prepared.batches().take(0, 7)
        lengths = [max(map(len, prepared.train.read(batch.rows)["input_ids"])) for batch in taken]
        longest.append(([batch.inputs[0].shape[1] for batch in taken], lengths))
        for batch in taken:
            assert batch.inputs[1].sum(1).tolist() == [len(row) for row in prepared.train.read(batch.rows)["input_ids"]]
    (plain, lengths), (alike, _) = longest
    assert plain == lengths
    assert alike == [max(lengths[:3])] * 3 + lengths[3:], "the smaller last one goes through by itself"


def test_evaluation_goes_through_a_pipeline_in_groups_padded_alike(tmp_path: Path) -> None:
    prepared = texts(
        tmp_path,
        list(range(1, 16)) * 4,
        train={"global_batch_size": 8, "gradient_accumulation_steps": 2, "evaluation_batch_size": 2},
        data={"evaluation_fraction": 0.5},
        parallel={"pipeline": 2},
    )
    batches = list(prepared.evaluation())
    assert [batch.group for batch in batches] == [0] * 8 + [8] * 7
    assert len({batch.inputs[0].shape for batch in batches[:8]}) == 1


def test_the_example_is_the_same_for_all_replicas(images: Callable[..., Prepared]) -> None:
    prepared = images(train={"shuffle": True})
    first, other = prepared.batches().example(), prepared.batches(replica=1, num_replicas=2).example()
    assert first.rows.tolist() == other.rows.tolist() == prepared.batches().rows(0, 8).tolist()
    assert torch.equal(first.inputs[0], other.inputs[0])


def test_the_wait_is_the_time_that_take_took_and_what_was_prepared_in_time_is_not_waited_for(
    images: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, batches = Shards.read, images().batches()
    prepared = threading.Event()

    def slow(shards: Shards, rows: Any) -> Any:
        time.sleep(0.2)
        values = read(shards, rows)
        if threading.current_thread() is not threading.main_thread():
            prepared.set()
        return values

    monkeypatch.setattr(Shards, "read", slow)
    batches.take(0, 8)
    assert batches.wait_s >= 0.2, "nothing was prepared for the first step"
    assert prepared.wait(10)
    time.sleep(0.1)  # collating takes less than a millisecond
    batches.take(8, 8)
    assert batches.wait_s < 0.1
    began = time.perf_counter()
    batches.take(16, 8)
    assert 0.1 < batches.wait_s <= time.perf_counter() - began
    batches.close()
