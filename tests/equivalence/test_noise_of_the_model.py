"""Noise that belongs to a model, as in a VAE, is the same bits in every layout and after a resume, and is verified."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.tasks.export import export_file
from onward.trainer.diagnostics.diff import compare
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir, read_config
from tests.support import runs

ROWS = 60


def autoencoder() -> onnx.ModelProto:
    """`x` [batch, 6] -> `y` [batch, 6]: a mean and a deviation, noise, and a decoder; `scales` scales the noise.

    Each kind of random operator has its part; the uniform one has one number for all samples.
    """
    g = GraphWriter("autoencoder", seed=0, opset=15)
    x = g.input("x", ("batch", 6))
    g.input("scales", (3,))
    mean = g.op("MatMul", x, g.weight("mean", g.normal(0.5, 6, 5)))
    deviation = g.op("Exp", g.op("MatMul", x, g.weight("deviation", g.normal(0.2, 6, 5))))
    noise = g.op("Mul", g.op("RandomNormalLike", mean, outputs="eps"), deviation)
    noise = g.op("Mul", noise, g.op("Gather", "scales", g.weight("first", [0])))
    kept = g.op("Bernoulli", g.op("Sigmoid", mean))
    shift = g.op("RandomUniform", shape=[1, 5], low=-0.2, high=0.2)
    hidden = g.op("Add", g.op("Mul", g.op("Add", mean, noise), kept), shift)
    g.op("MatMul", hidden, g.weight("decoder", g.normal(0.5, 5, 6)), outputs="y")
    g.output("y", ("batch", 6))
    return g.model()


def make_run(folder: Path, **sections: Any) -> RunDir:
    x = np.random.default_rng(2).normal(size=(ROWS, 6)).astype(np.float32)
    train = {"global_batch_size": 12, "num_steps": 8} | sections.pop("train", {})
    model = {"loss": "mse", "bind": {"scales": [0.667, 1, 0.8]}}
    optimizer = {"learning_rate": 0.02, "name": "sgd"}
    data = {"x": x, "label": x}
    return runs.make_run(folder, autoencoder(), data, model=model, train=train, optimizer=optimizer, **sections)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("one"), checkpoint={"period": 4})
    runs.train_run(run)
    return run


@pytest.mark.mpi
@pytest.mark.slow
def test_the_file_is_verified_with_the_numbers_that_the_module_drew(one_rank: RunDir) -> None:
    exported = export_file(one_rank, one_rank.checkpoint(8))
    assert exported.parity < 2e-6
    found = compare(read_config(one_rank).model.path, exported.path)
    assert not found.nodes
    assert not found.interface
    assert exported.changed == 3
    again = export_file(one_rank, one_rank.checkpoint(8))
    assert again.after == exported.after
    assert again.before == exported.before


@pytest.mark.mpi
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"data": 2}},
        {"train": {"gradient_accumulation_steps": 3}},
        {"parallel": {"data": 2, "pipeline": 2}, "train": {"gradient_accumulation_steps": 2}},
    ],
    ids=str,
)
def test_every_layout_draws_the_same_noise(one_rank: RunDir, tmp_path: Path, sections: dict[str, Any]) -> None:
    run = make_run(tmp_path, **sections)
    runs.train_run(run)
    # only the order of the sums over the samples differs; other noise would change the first digit
    assert runs.losses(run) == pytest.approx(runs.losses(one_rank), rel=1e-5)
    runs.assert_close(runs.final_tensors(run), runs.final_tensors(one_rank), 1e-5)
    evaluations = [[event.values for event in runs.events(each, "evaluation")] for each in (run, one_rank)]
    assert evaluations[0][-1] == pytest.approx(evaluations[1][-1], rel=1e-5)


@pytest.mark.mpi
def test_killed_and_resumed_ends_with_the_same_bits(one_rank: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint={"period": 4})
    runs.train_until(run, ("scalars", 6), signal.SIGKILL, rank=0)
    runs.train_run(run)
    runs.assert_equal_bits(runs.final_tensors(run), runs.final_tensors(one_rank))


@pytest.mark.mpi
def test_another_seed_draws_other_noise_in_training_and_the_same_in_evaluation(
    one_rank: RunDir, tmp_path: Path
) -> None:
    run = make_run(tmp_path, train={"seed": 5, "shuffle": False})
    other = make_run(tmp_path / "other", train={"seed": 6, "shuffle": False})
    for each in (run, other):
        runs.train_run(each)
    assert runs.losses(run)[1] != pytest.approx(runs.losses(other)[1], rel=1e-3)
    first = [runs.events(each, "evaluation")[0].values for each in (run, other, one_rank)]
    assert first[0] == first[1] == first[2]
