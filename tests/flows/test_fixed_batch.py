"""Whole runs of files that torch exported with a fixed batch: the loss falls, the gate passes, the batch stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.trainer.run.directory import RunDir, read_config
from tests.support.fixed_batches import EXPORTERS, FILES, Exporter, exported
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
[model]
path = "model.onnx"
[data]
source = "data.npz"
[train]
global_batch_size = 16
gradient_accumulation_steps = {steps}
num_steps = 80
[optimizer]
learning_rate = 0.01
[parallel]
data = {replicas}
[launch]
device = "cpu"
threads_per_rank = 1
"""
RUNS = {"vit-1": 16, "attention-2": 16, "lstm-4": 16, "over-the-batch-4": 4, "squeezed-1": 1, "squeezed-result-1": 1}
"""File -> rows in a micro-batch."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def prepare(workshop: Workshop, name: str, exporter: Exporter, *, rows: int, replicas: int = 1) -> Path:
    """Write a file, its data and the configuration; return the last."""
    file, random = FILES[name], np.random.default_rng(0)
    label = np.arange(150) % 4
    if file.ids:
        x = random.integers(0, file.ids, (150, *file.shape))
        x[:, -1] = label
    else:
        x = random.normal(size=(150, *file.shape)).astype(np.float32)
        for row, number in enumerate(label):
            x[row, ..., number] += 3
    folder = workshop.root / f"{name}-{exporter}-{rows}-{replicas}"
    folder.mkdir()
    onnx.save(exported(name, exporter), folder / "model.onnx")
    np.savez(folder / "data.npz", x=x, label=label)
    steps = 16 // (rows * replicas)
    (folder / "config.toml").write_text(CONFIG.format(steps=steps, replicas=replicas))
    return folder / "config.toml"


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(("name", "rows"), RUNS.items())
def test_a_file_of_fixed_batch_goes_through_a_whole_run(
    name: str, rows: int, exporter: Exporter, workshop: Workshop
) -> None:
    facts = workshop.onward("run", str(prepare(workshop, name, exporter, rows=rows)))
    assert facts["parity"] < 1e-3
    assert facts["after"]["evaluation/loss"] < 0.6 * facts["before"]["evaluation/loss"]
    assert facts["after"]["evaluation/accuracy"] > 0.6
    given, trained = exported(name, exporter), onnx.load(facts["model"])
    assert given.graph.input == trained.graph.input
    assert [node.SerializeToString() for node in given.graph.node] == [
        n.SerializeToString() for n in trained.graph.node
    ]
    assert read_config(RunDir(Path(facts["directory"]))).model.fixed_batch == FILES[name].use


@pytest.mark.parametrize("name", ["squeezed-1", "over-the-batch-4"])
def test_two_replicas_train_a_file_at_its_own_batch(name: str, workshop: Workshop) -> None:
    facts = workshop.onward("run", str(prepare(workshop, name, "legacy", rows=RUNS[name], replicas=2)))
    assert facts["after"]["evaluation/loss"] < 0.6 * facts["before"]["evaluation/loss"]


@pytest.mark.parametrize("name", ["squeezed-1", "over-the-batch-4"])
def test_micro_batches_of_another_size_are_refused_before_anything_is_launched(name: str, workshop: Workshop) -> None:
    config = prepare(workshop, name, "dynamo", rows=16)
    process = workshop.start("run", str(config))
    _, error = process.communicate(timeout=300)
    assert process.returncode == 2
    assert f"train.gradient_accumulation_steps = {16 // FILES[name].batch}" in error
    assert "mpirun" not in error
