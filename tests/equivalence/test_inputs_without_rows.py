"""Inputs that are not rows of a batch, states on axis 1, scales, rates, are trained, verified and exported as such."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

import onward
from onward.tasks.export import export_file
from onward.trainer.config.loading import load_config
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.diagnostics.diff import compare
from onward.trainer.errors import ConfigError
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.export_folder import example_in
from onward.trainer.run.records import ExportedModel
from tests.support import runs
from tests.support.exported_runs import exported_model, exported_run, two_tables

Array = np.ndarray[Any, np.dtype[Any]]
ROWS = 60


def recurrent(*, axis: int = 1) -> onnx.ModelProto:
    """`x` [batch, 5, 4], the GRU's first state `h`, `rate` [], `scales` [3] -> `y` [batch, 3], `hn` [1, batch, 6].

    axis: that of the rows in `h`, [1, batch, 6] or [batch, 1, 6].
    """
    g = GraphWriter("recurrent", seed=0, opset=15)
    x = g.input("x", ("batch", 5, 4))
    h = g.input("h", (1, "batch", 6) if axis else ("batch", 1, 6))
    g.input("scales", (3,))
    g.input("rate", (), TensorProto.INT64)
    steps = g.op("Transpose", g.op("Mul", x, g.op("Cast", "rate", to=TensorProto.FLOAT)), perm=[1, 0, 2])
    first = h if axis else g.op("Transpose", h, perm=[1, 0, 2])
    weights = [g.weight(name, g.normal(0.5, *shape)) for name, shape in (("w", (1, 18, 4)), ("r", (1, 18, 6)))]
    g.op("GRU", steps, *weights, "", "", first, outputs=["", "hn"], hidden_size=6)
    last = g.op("Squeeze", "hn", g.weight("axis", [0]))
    logits = g.op("MatMul", last, g.weight("head", g.normal(0.5, 6, 3)))
    g.op("Mul", logits, "scales", outputs="y")
    g.output("y", ("batch", 3))
    g.output("hn", (1, "batch", 6))
    return g.model()


BOUND = {"scales": [0.667, 1, 0.8], "rate": 2}


def columns(*, state: bool = True) -> dict[str, Array]:
    random = np.random.default_rng(3)
    x, h = random.normal(size=(ROWS, 5, 4)).astype(np.float32), random.normal(size=(ROWS, 1, 6)).astype(np.float32)
    label = ((x.sum((1, 2)) > 0).astype(np.int64) + (h.sum((1, 2)) > 0)).astype(np.int64)
    return {"x": x, "label": label} | ({"h": h} if state else {})


def make_run(folder: Path, proto: onnx.ModelProto, data: dict[str, Array], **sections: Any) -> RunDir:
    sections = {"model": {"bind": BOUND}, **sections}
    train = {"global_batch_size": 8, "num_steps": 12} | sections.pop("train", {})
    return runs.make_run(folder, proto, data, **sections, train=train, optimizer={"learning_rate": 0.02})


def trained_and_exported(run: RunDir) -> ExportedModel:
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    evaluations = [event.values for event in runs.events(run, "evaluation")]
    # onnxruntime has evaluated the file that is delivered, on what the ranks have computed with
    assert exported.before == pytest.approx(evaluations[0], rel=1e-5)
    assert exported.after == pytest.approx(evaluations[-1], rel=1e-5)
    assert exported.after["evaluation/loss"] < exported.before["evaluation/loss"]
    assert exported.parity < 2e-6
    found = compare(read_config(run).model.path, exported.path)
    assert not found.nodes
    assert not found.interface
    return exported


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_column_of_states_is_stacked_on_the_axis_of_the_batch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "axis 1", recurrent(), columns())
    exported = trained_and_exported(run)
    # the truth: a file that takes its states with the rows on axis 0, and moves the axis itself
    wanted = make_run(tmp_path / "axis 0", recurrent(axis=0), columns())
    runs.train_run(wanted)
    runs.assert_equal_bits(runs.final_tensors(run), runs.final_tensors(wanted))

    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    with np.load(example_in(run.export), allow_pickle=False) as example:
        feed = dict(example)
    assert {name: array.shape for name, array in feed.items()} == {
        "x": (1, 5, 4),
        "h": (1, 1, 6),
        "scales": (3,),
        "rate": (),
    }
    np.testing.assert_array_equal(feed["scales"], np.float32(BOUND["scales"]))
    session.run(None, feed)


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_state_bound_to_zeros_trains_as_one_that_the_graph_leaves_out(tmp_path: Path) -> None:
    data = columns(state=False)
    run = make_run(tmp_path / "bound", recurrent(), data, model={"bind": {**BOUND, "h": 0}})
    trained_and_exported(run)
    # the truth: by ONNX's definition the first state is zeros where the operand is absent
    without = copy.deepcopy(recurrent())
    (gru,) = (node for node in without.graph.node if node.op_type == "GRU")
    gru.input[5] = ""
    del without.graph.input[1]
    wanted = make_run(tmp_path / "without", without, data)
    runs.train_run(wanted)
    runs.assert_close(runs.final_tensors(run), runs.final_tensors(wanted), 1e-6)


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=str)
def test_several_ranks_train_as_one(tmp_path: Path, parallel: dict[str, int]) -> None:
    train = {"gradient_accumulation_steps": 2} if "pipeline" in parallel else {}
    run = make_run(tmp_path / "ranks", recurrent(), columns(), parallel=parallel, train=train)
    trained_and_exported(run)
    wanted = make_run(tmp_path / "one", recurrent(), columns())
    runs.train_run(wanted)
    runs.assert_close(runs.final_tensors(run), runs.final_tensors(wanted), 1e-4)


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_loss_reads_an_output_whose_rows_are_on_axis_1(tmp_path: Path) -> None:
    data = columns()
    # learnt only where rows and targets are the same ones
    target = np.tanh(2 * data["h"])
    model = {"bind": BOUND, "loss": "mse", "output": "hn"}
    run = make_run(tmp_path, recurrent(), {**data, "label": target}, model=model, train={"num_steps": 40})
    exported = trained_and_exported(run)
    feed = {
        "x": data["x"],
        "h": np.moveaxis(data["h"], 0, 1),
        "scales": np.float32(BOUND["scales"]),
        "rate": np.array(BOUND["rate"]),
    }
    errors = []
    for path in (read_config(run).model.path, exported.path):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        errors.append(((session.run(["hn"], feed)[0] - np.moveaxis(target, 0, 1)) ** 2).mean())
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_predicted_with_the_values_of_training(tmp_path: Path, axis: int) -> None:
    data = columns()
    tables = two_tables(tmp_path, **{name: array.tolist() for name, array in data.items()})
    loss = {"name": "cross_entropy", "output": "y"}
    sections: dict[str, Any] = {"data": {**tables, "label": "label"}, "loss": loss, "model": {"bind": BOUND}}
    run = exported_run(tmp_path, recurrent(axis=axis), **sections)
    path = tmp_path / "model.onnx"
    write_preprocessing(run, exported_model(path), tmp_path)
    found = onward.predict(path, tmp_path / "b.parquet")
    feed = {"x": data["x"], "h": np.moveaxis(data["h"], 0, axis)}
    feed |= {"scales": np.float32(BOUND["scales"]), "rate": np.array(BOUND["rate"])}
    (scores,) = onnxruntime.InferenceSession(path).run(["y"], feed)
    np.testing.assert_array_equal(found["class"], scores.argmax(1))


@pytest.mark.parametrize(
    ("state", "sections", "problems"),
    [
        (
            True,
            {"model": {"bind": {}}},
            (
                "input scales is of shape [3], no axis of which is known to have the rows of the batch: give it a "
                "value: model.bind = {scales = 0} (a number, or a list of shape [3] for all rows)",
                "input rate is a single number, no axis of which is known to have the rows",
            ),
        ),
        (False, {}, ("set data.inputs.h, or, if no column is meant, give it a value: model.bind = {h = 0}",)),
        (
            True,
            {"data": {"inputs": {"scales": "h"}}},
            ("input scales has a value in model.bind and a column in data.inputs; remove one of them",),
        ),
        (True, {"model": {"bind": BOUND, "batch_axes": {"h": 0}}}, ("model.batch_axes = {h = 1}",)),
        (True, {"model": {"bind": {**BOUND, "hh": 0}}}, ("model.bind names 'hh', which is not an input",)),
    ],
)
def test_inputs_that_nothing_feeds_are_refused_with_their_shape_before_anything_starts(
    tmp_path: Path, state: bool, sections: dict[str, Any], problems: tuple[str, ...]
) -> None:
    onnx.save(recurrent(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **columns(state=state))
    raw = {
        "model": {"path": tmp_path / "model.onnx", "bind": BOUND} | sections.get("model", {}),
        "data": {"source": str(tmp_path / "data.npz")} | sections.get("data", {}),
        "train": {"num_steps": 1},
    }
    with pytest.raises(ConfigError) as refused:
        load_config(raw, [], check=check_files_and_data)
    for problem in problems:
        assert problem in str(refused.value)
