"""A file that begins with strings is trained where numbers begin, and comes back whole: strings in, new weights."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

from onward.tasks.export import export_file
from onward.trainer.diagnostics.diff import compare
from onward.trainer.errors import ExportRefused
from onward.trainer.export.export_commands import evaluation_data
from onward.trainer.export.file_verification import Expected, verify
from onward.trainer.export.model_file import ModelFile
from onward.trainer.model.trainable import open_trainable
from onward.trainer.onnx_import.imported_graph import stored_weights
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.export_folder import example_in
from tests.support import runs
from tests.trainer.onnx_graph.surgery.test_preprocessing_nodes import HEAD, TREE

FOREIGN = Path(__file__).resolve().parents[1] / "support" / "foreign"
WORDS = ["good", "great", "fine", "bad", "poor", "awful", "film", "plot", "actor", "music", "the", "a"]
Array = np.ndarray[Any, np.dtype[Any]]


def sentences(rows: int) -> dict[str, list[Any]]:
    """Sentences of 1 to 9 words; the label is whether good words outnumber bad ones."""
    random = np.random.default_rng(1)
    words = [random.choice(WORDS, random.integers(1, 10)) for _ in range(rows)]
    label = [int(sum(w in WORDS[:3] for w in row) > sum(w in WORDS[3:6] for w in row)) for row in words]
    return {"text": [" ".join(row) for row in words], "label": label}


def codes(rows: int) -> dict[str, list[Any]]:
    """A color, two numbers and a code, all of which decide the label."""
    random = np.random.default_rng(1)
    color = random.choice(["red", "green", "blue", "pink"], rows)
    size = random.normal(0, 1, (rows, 2)).round(4)
    code = [f"{random.choice(['N', 'O'])}-{random.integers(1, 99)}" for _ in range(rows)]
    label = (color == "red") + (np.array([c[0] == "N" for c in code]) & (size[:, 0] > 0))
    return {"color": list(color), "w": list(size[:, 0]), "h": list(size[:, 1]), "code": code, "label": list(label)}


def table(rows: int) -> dict[str, list[Any]]:
    """The columns of make_skl2onnx_text.py; color and weight decide the label."""
    random = np.random.default_rng(1)
    color, size = random.choice(["red", "green", "blue"], rows), random.choice(["small", "medium", "large"], rows)
    weight, age = random.normal(3, 2, rows).round(3), random.normal(30, 9, rows).round(3)
    label = np.where(color == "red", 0, np.where(weight > 3, 1, 2))
    return {"color": list(color), "size": list(size), "weight": list(weight), "age": list(age), "label": list(label)}


Columns = Mapping[str, list[Any]]
CASES: dict[str, tuple[Callable[[int], Columns], dict[str, Any]]] = {
    "text-sentences": (sentences, {}),
    "text-columns": (codes, {"data": {"inputs": {"size": ["w", "h"]}}}),
    "text-skl2onnx-columns": (table, {"model": {"output": "add_result1"}}),
    "text-skl2onnx-words": (sentences, {"model": {"output": "probabilities/log_probabilities"}}),
}


def make_run(folder: Path, name: str, **sections: Any) -> RunDir:
    columns, settings = CASES[name]
    data = columns(400)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(map(str, row)) for row in zip(*data.values(), strict=True)]
    (folder / "data.csv").write_text("\n".join([",".join(data), *lines]) + "\n")
    source = {"source": str(folder / "data.csv"), **settings.get("data", {})}
    fast = {"train": {"global_batch_size": 20, "num_steps": 60}, "optimizer": {"learning_rate": 0.05}}
    sections = {**fast, "parallel": {"data": 2}, **settings, **sections, "data": source}
    return runs.make_run(folder, onnx.load(FOREIGN / f"{name}.onnx"), {"unused": np.zeros(1)}, **sections)


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "text-sentences" else pytest.mark.slow) for name in CASES]
)
def test_loss_falls_and_the_whole_file_is_proven_on_strings(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, name)
    last = run.checkpoint(runs.train_run(run).step)
    exported = export_file(run, last)
    evaluations = [event.values for event in runs.events(run, "evaluation")]
    # the ranks read numbers; the gate has read the same rows as strings
    assert exported.before == pytest.approx(evaluations[0], rel=1e-5)
    assert exported.after == pytest.approx(evaluations[-1], rel=1e-5)
    assert exported.after["evaluation/loss"] < 0.8 * exported.before["evaluation/loss"]
    assert exported.parity < 2e-6

    original = read_config(run).model.path
    found = compare(original, exported.path)
    assert not found.nodes
    assert not found.interface
    assert len(found.tensors) == exported.changed > 0

    columns = CASES[name][0](3)
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    feed = {}
    for value in session.get_inputs():
        names = read_config(run).data.inputs.get(value.name, (value.name,))
        kind = object if value.type == "tensor(string)" else np.float32
        array = np.stack([np.array(columns[column], kind) for column in names], axis=1)
        feed[value.name] = array if len(value.shape) == 2 else array[:, 0]
    assert [len(result) for result in session.run(None, feed)] == [3] * len(session.get_outputs())
    with np.load(example_in(run.export), allow_pickle=False) as example:
        assert set(example) == set(feed)
        session.run(None, {name: example[name].astype(feed[name].dtype) for name in example})


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_bits_of_a_run_without_interruption(tmp_path: Path) -> None:
    wanted = make_run(tmp_path / "whole", "text-sentences", checkpoint={"period": 20})
    runs.train_run(wanted)
    run = make_run(tmp_path / "killed", "text-sentences", checkpoint={"period": 20})
    runs.train_until(run, lambda event: event.step > 30 and event.kind == "scalars", signal.SIGKILL)
    assert not run.result(1).exists()
    runs.train_run(run)
    assert run.current_attempt == 2
    runs.assert_equal_bits(runs.final_tensors(run), runs.final_tensors(wanted))


def test_the_gate_refuses_a_file_in_which_words_mean_something_else(tmp_path: Path) -> None:
    run = make_run(tmp_path, "text-sentences")
    config = read_config(run)
    trainable, data = open_trainable(config), evaluation_data(run)
    weights = {name: tensor.detach() for name, tensor in stored_weights(trainable.module).items()}
    source = ModelFile(config.model.path, trainable.model)
    expected = Expected(source, weights, trainable.module.eval(), config.model)
    assert verify(ModelFile.read(config.model.path), expected, data=data, config=config.export).parity < 2e-6
    mutant = onnx.load(config.model.path)
    encoder = next(node for node in mutant.graph.node if node.op_type == "LabelEncoder")
    words = next(attribute for attribute in encoder.attribute if attribute.name == "keys_strings").strings
    words[1], words[4] = words[4], words[1]
    (tmp_path / "mutant.onnx").write_bytes(mutant.SerializeToString())
    with pytest.raises(ExportRefused) as caught:
        verify(ModelFile.read(tmp_path / "mutant.onnx"), expected, data=data, config=config.export)
    assert "1 of the original's 13 nodes are not the same" in str(caught.value)
    assert "output 'logits', batch" in str(caught.value)  # its results on the same sentences are others


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_network_that_reads_decision_trees_is_trained_and_the_whole_file_is_proven(tmp_path: Path) -> None:
    model = parser.parse_model(
        HEAD
        + f"""g (float[N, 4] x) => (float[N, 1] y) <float[5, 1] w = {{0.1, 0.1, 0.1, 0.1, 0.1}}> {{
        score = {TREE} (x)
        both = Concat <axis = 1> (x, score)
        y = MatMul (both, w)
    }}"""
    )
    rows = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    columns = {"x": rows, "label": (rows.sum(1, keepdims=True) + 3 * (rows[:, :1] > 0.5)).astype(np.float32)}
    training = {"train": {"global_batch_size": 20, "num_steps": 60}, "optimizer": {"learning_rate": 0.05}}
    run = runs.make_run(tmp_path, model, columns, model={"loss": "mse"}, **training)
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    assert exported.after["evaluation/loss"] < 0.5 * exported.before["evaluation/loss"]
    assert exported.parity < 2e-6
