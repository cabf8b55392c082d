"""Integers behind Cast and Mul are weights, as behind DequantizeLinear; what stays frozen is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper

from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.onnx_graph.builder import GraphWriter
from onward.trainer.onnx_import.cast_weights import cast_integers
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model

Array = np.ndarray[Any, np.dtype[Any]]


def encoder(*, zero: bool = False, per_column: bool = True, computed_scale: bool = False) -> onnx.ModelProto:
    """An int8 encoder as it is published: Gather and MatMul of int8 numbers, each behind Cast and Mul."""
    g = GraphWriter("encoder", opset=17)

    def weight(name: str, rows: int, columns: int) -> str:
        g.weight(name, g.random.integers(-120, 120, (rows, columns)).astype(np.int8))
        scale = 0.01 + 0.01 * g.random.random((1, columns) if per_column else (1,))
        g.weight(f"{name}.scale", scale.astype(np.float32))
        if zero:
            g.weight(f"{name}.zero", np.full((1,), 3, np.float32))
        return name

    def scaled(value: str, name: str) -> str:
        value = g.op("Cast", value, to=TensorProto.FLOAT)
        value = g.op("Sub", value, f"{name}.zero") if zero else value
        return g.op("Mul", value, g.op("Abs", f"{name}.scale") if computed_scale else f"{name}.scale")

    words = g.input("words", ("batch", "length"), TensorProto.INT64)
    g.weight("table", g.random.integers(-120, 120, (30, 8)).astype(np.int8))
    g.weight("table.scale", np.full((1,), 0.01, np.float32))
    x = g.op("Mul", g.op("Cast", g.op("Gather", "table", words), to=TensorProto.FLOAT), "table.scale")
    x = g.op("Tanh", g.op("MatMul", x, scaled(weight("hidden", 8, 6), "hidden")))
    x = g.op("MatMul", x, scaled(weight("out", 6, 4), "out"))
    g.op("Add", x, g.weight("bias", g.normal(0.1, 4)), outputs="y")
    g.output("y", ("batch", "length", 4))
    return g.model()


def run(model: onnx.ModelProto, words: torch.Tensor) -> Array:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"words": words.numpy()})[0])


FORMS = {"": {}, "zero point": {"zero": True}, "one scale": {"per_column": False}}


@pytest.mark.parametrize("form", FORMS)
def test_integers_behind_cast_and_mul_are_trained_and_written_as_integers(form: str, tmp_path: Path) -> None:
    model = encoder(**FORMS[form])
    words = torch.randint(0, 30, (3, 5))
    module = to_module(model)
    np.testing.assert_allclose(module(words).detach().numpy(), run(model, words), atol=1e-5)
    weights = named_weights(module)
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    assert sorted(trained) == ["bias", "hidden", "out", "table"]

    # the loss falls by whole steps of the integers, and the written file computes what the module does
    goal = torch.randn(3, 5, 4)
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (module(words) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    onnx.save_model(model, tmp_path / "model.onnx")
    write_model(module, model, tmp_path / "model.onnx", tmp_path / "written.onnx")
    written = onnx.load_model(tmp_path / "written.onnx")
    np.testing.assert_allclose(run(written, words), module(words).detach().numpy(), atol=1e-5)
    for old, new in zip(model.graph.initializer, written.graph.initializer, strict=True):
        same = np.array_equal(numpy_helper.to_array(old), numpy_helper.to_array(new))
        assert (old.name, old.data_type) == (new.name, new.data_type)
        assert same == (old.name not in trained)


def test_a_file_that_was_not_trained_is_written_as_it_was(tmp_path: Path) -> None:
    onnx.save_model(encoder(zero=True), tmp_path / "model.onnx")
    model = onnx.load_model(tmp_path / "model.onnx")
    write_model(to_module(model), model, tmp_path / "model.onnx", tmp_path / "written.onnx")
    assert (tmp_path / "written.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_integers_whose_scale_is_computed_stay_frozen_and_are_counted(tmp_path: Path) -> None:
    onnx.save_model(encoder(computed_scale=True), tmp_path / "model.onnx")
    found = diagnose(tmp_path / "model.onnx")
    kinds = {weight.name: weight.kind for weight in found.weights}
    assert (kinds["table"], kinds["hidden"], kinds["out"]) == ("trained", "frozen", "frozen")
    (warning,) = [each for each in found.warnings if each.key == "quantized"]
    # 240 of the table, 4 of the bias and 10 of the scales that are weights of the graph's own; 48 + 24 + 1 are frozen
    assert warning.what.endswith("stay frozen: 254 of 327 numbers are trained")
    assert found.totals["frozen"].values == 48 + 24 + 1


def test_tensors_inside_bodies_are_counted_by_their_numbers(tmp_path: Path) -> None:
    inner = onnx.parser.parse_graph("body () => (float[3,4] z) { z = Identity(W) }")
    inner.initializer.append(numpy_helper.from_array(np.ones((3, 4), np.float32), "W"))
    other = onnx.parser.parse_graph(
        "body () => (float[3,4] z) { z = Constant<value = float[3,4] {1,2,3,4,5,6,7,8,9,1,2,3}>() }"
    )
    g = GraphWriter("branches", opset=17)
    x = g.input("x", ("batch", 3))
    flag = g.op("Greater", g.op("ReduceSum", x, keepdims=0), g.weight("limit", np.float32(0)))
    w = g.op("If", flag, then_branch=inner, else_branch=other)
    g.op("Add", g.op("MatMul", x, w), g.weight("bias", g.normal(1.0, 4)), outputs="y")
    g.output("y", ("batch", 4))
    onnx.save_model(g.model(), tmp_path / "model.onnx")
    found = diagnose(tmp_path / "model.onnx")
    (warning,) = [each for each in found.warnings if each.key == "inner_weights"]
    assert warning.what.startswith("2 tensors of 24 numbers (If_2/")
    assert warning.what.endswith("stay frozen: 4 of 29 numbers are trained")
    assert found.totals["frozen"].values == 25


def test_positions_that_are_cast_are_no_weights() -> None:
    g = GraphWriter("positions", opset=17)
    x = g.input("x", ("batch", 8))
    positions = g.op("Cast", g.weight("positions", np.arange(8)), to=TensorProto.FLOAT)
    g.op("Mul", x, positions, outputs="y")
    g.output("y", ("batch", 8))
    assert cast_integers(g.model().graph).integers == frozenset()
