"""Promise 10: each sample is seen exactly once per epoch, whatever the layout and however often it was killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import Batch, Batches, evaluation_batches
from onward.trainer.data.input_columns import InputColumns
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.shards import Shards
from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support import graphs
from tests.support.runs import final_tensors, make_run, train_run, train_until
from tests.support.shards import make_shards

CPU = torch.device("cpu")
NUM_ROWS = 102
"""Of which 92 are trained on: no multiple of any batch size below."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    features = np.arange(NUM_ROWS * 4, dtype=np.float32).reshape(NUM_ROWS, 4)
    np.savez(tmp_path / "data.npz", features=features, label=np.arange(NUM_ROWS))
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    return tmp_path


def configure(folder: Path, *, replicas: int = 1, accumulation: int = 1, batch: int = 12, epochs: int = 3) -> RunConfig:
    return build_config(
        {
            "model": {"path": folder / "model.onnx", "loss": "mse"},
            "data": {"source": str(folder / "data.npz"), "rows_per_shard": 10},
            "train": {"global_batch_size": batch, "gradient_accumulation_steps": accumulation, "num_epochs": epochs},
            "parallel": {"data": replicas},
        }
    )


def shards(config: RunConfig, split: str = "train") -> Shards:
    directory, _, _ = make_shards(
        config.data,
        InputColumns(config.data, config.loss, config.model, read_training_signature(config.model)).to_read(),
        config.model.path.parent / "cache",
    )
    return open_shards(directory, split)  # type: ignore[arg-type]


def steps(config: RunConfig, kills: tuple[int, ...] = ()) -> Iterator[list[int]]:
    """The labels, which number the samples, that all replicas see in each step.

    After the steps in `kills` every process is new and goes on from the last checkpoint, a step earlier.
    """
    rows = shards(config)
    replicas = config.parallel.data

    signature = read_training_signature(config.model)

    def start() -> list[Batches]:
        return [Batches(rows, config, signature, replica=r, num_replicas=replicas, device=CPU) for r in range(replicas)]

    ranks = start()
    total = config.train.samples_of_run(rows.num_rows)
    for step, position in enumerate(range(0, total, config.train.global_batch_size)):
        count = min(config.train.global_batch_size, total - position)
        taken = [rank.take(position, count) for rank in ranks]
        assert all(len(part) <= config.train.gradient_accumulation_steps for part in taken)
        assert all(batch.size <= config.micro_batch_size for part in taken for batch in part)
        seen = labels(taken)
        if step in kills:  # this step was never saved: it is made again by the next processes
            for rank in ranks:
                rank.close()
            ranks = start()
            again = [rank.take(position, count) for rank in ranks]
            assert labels(again) == seen
        yield seen
    for rank in ranks:
        rank.close()


def labels(replicas: Iterable[Iterable[Batch]]) -> list[int]:
    """What counts of their batches: an idle one repeats another replica's sample, and its loss counts nothing."""
    return [int(label) for part in replicas for batch in part if not batch.is_padding for label in batch.labels[0]]


@pytest.mark.parametrize("kills", [(), (0, 3, 4, 22)], ids=["never killed", "killed four times"])
@pytest.mark.parametrize(
    ("replicas", "accumulation", "batch"),
    [
        (1, 1, 12),
        (2, 1, 12),
        (3, 2, 12),
        (4, 3, 12),
        (1, 12, 12),
        (12, 1, 12),
        (2, 2, 100),
        (1, 1, 1),
        (5, 1, 500),
        (5, 1, 25),
    ],
)
def test_each_epoch_sees_each_sample_exactly_once(
    folder: Path, replicas: int, accumulation: int, batch: int, *, kills: tuple[int, ...]
) -> None:
    config = configure(folder, replicas=replicas, accumulation=accumulation, batch=batch)
    stream = [sample for step in steps(config, kills) for sample in step]
    num_rows = shards(config).num_rows
    epochs = [stream[start : start + num_rows] for start in range(0, len(stream), num_rows)]
    assert len(epochs) == 3
    for epoch in epochs:
        assert len(set(epoch)) == num_rows == len(epoch)
    assert epochs[0] != epochs[1] != epochs[2]


def test_every_layout_sees_the_same_samples_in_the_same_step(folder: Path) -> None:
    layouts = [{}, {"replicas": 2}, {"replicas": 3, "accumulation": 4}, {"accumulation": 6}]
    one, *others = [list(steps(configure(folder, **layout))) for layout in layouts]
    assert all(other == one for other in others)


def test_a_sample_is_what_it_was_before_the_shuffle(folder: Path) -> None:
    config = configure(folder)
    with_features = Batches(
        shards(config), config, read_training_signature(config.model), replica=0, num_replicas=1, device=CPU
    ).take(0, 12)
    for batch in with_features:
        assert torch.equal(batch.inputs[0][:, 0], 4 * batch.labels[0])


@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 20])
def test_evaluation_sees_each_sample_exactly_once(folder: Path, replicas: int) -> None:
    config = configure(folder)
    held_out = shards(config, "evaluation")
    parts = [
        list(
            evaluation_batches(
                held_out, config, read_training_signature(config.model), replica=r, num_replicas=replicas, device=CPU
            )
        )
        for r in range(replicas)
    ]
    assert len({len(part) for part in parts}) == 1, "ranks pass through the graph together"
    seen = labels(parts)
    trained = {sample for step in steps(configure(folder, epochs=1)) for sample in step}
    assert len(seen) == len(set(seen)) == held_out.num_rows
    assert set(seen) | trained == set(range(NUM_ROWS))
    assert not set(seen) & trained


# -- how ONNX Runtime's trainer skipped and repeated samples


def predecessors_batch(number: int, *, size: int, num_samples: int) -> list[int]:
    """GetKthBatch adds the offset twice: batch k begins at 2 k B, and wraps around at the end."""
    return [(2 * number * size + at) % num_samples for at in range(size)]


def test_half_of_a_shard_is_never_skipped(folder: Path) -> None:
    config = configure(folder, batch=23, epochs=1)  # 92 rows in 4 batches: an even number, where the bug shows
    theirs = {sample for k in range(4) for sample in predecessors_batch(k, size=23, num_samples=92)}
    assert len(theirs) == 46
    assert len({sample for step in steps(config) for sample in step}) == 92


def test_the_last_batch_is_smaller_and_does_not_wrap_around(folder: Path) -> None:
    config = configure(folder, batch=30, epochs=1)
    sizes = [len(step) for step in steps(config)]
    assert sizes == [30, 30, 30, 2]


def counting_model(rows: int) -> onnx.ModelProto:
    """Its loss is the mean of the batch's entries of a table: a step of rate B takes exactly 1 from each entry."""
    g = GraphWriter("counts")
    row = g.input("row", ["batch"], TensorProto.INT64)
    table = g.weight("seen", np.zeros((rows, 2), np.float32))
    g.op("ReduceMean", g.op("Gather", table, row), keepdims=0, outputs="loss")
    g.output("loss", [])
    return g.model()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "accumulation"),
    [pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)],
)
def test_on_real_ranks_killed_twice_every_sample_has_been_learned_from_once_in_each_epoch(
    tmp_path: Path, ranks: int, accumulation: int
) -> None:
    run = make_run(
        tmp_path,
        counting_model(80),
        {"row": np.arange(80, dtype=np.int64)},
        model={"loss": "output"},
        train={"global_batch_size": 8, "num_epochs": 3, "gradient_accumulation_steps": accumulation, "clip_norm": 0},
        optimizer={"name": "sgd", "learning_rate": 16.0},
        parallel={"data": ranks},
        checkpoint={"period": 4},
    )
    for step in (6, 15):
        train_until(run, lambda event, step=step: event.kind == "scalars" and event.step >= step, rank=ranks - 1)
    train_run(run)
    seen = -final_tensors(run)["model/seen"].numpy()
    trained = open_shards(run.shards, "train")
    expected = np.zeros((80, 2), np.float32)
    expected[trained.read(np.arange(trained.num_rows))["row"]] = 3.0
    assert trained.num_rows == 64
    assert np.array_equal(seen, expected)
