"""Inputs that are not rows: values from the configuration, and rows on another axis than 0, as onnxruntime has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.surgery.row_layout import layout_problems, read_layout, rows_first
from onward.trainer.onnx_import.driver import to_module

Array = np.ndarray[Any, np.dtype[Any]]


def settings(**given: Any) -> ModelConfig:
    return ModelConfig(path=Path("model.onnx"), **given)


def states(*, batch: int | str = "batch", dims: tuple[int | str, ...] | None = None) -> onnx.ModelProto:
    """A GRU whose first state is an input: `x` [batch, 5, 4], `h` [1, batch, 3] -> `y` [batch, 2], `hn` as `h`."""
    g = GraphWriter("states", seed=0, opset=15)
    x = g.input("x", (batch, 5, 4))
    h = g.input("h", dims or (1, batch, 3))
    steps = g.op("Transpose", x, perm=[1, 0, 2])
    weights = [g.weight(name, g.normal(0.5, *shape)) for name, shape in (("w", (1, 9, 4)), ("r", (1, 9, 3)))]
    g.op("GRU", steps, *weights, "", "", h, outputs=["", "hn"], hidden_size=3)
    last = g.op("Squeeze", "hn", g.weight("axis", [0]))
    g.op("MatMul", last, g.weight("head", g.normal(0.5, 3, 2)), outputs="y")
    g.output("y", (batch, 2))
    g.output("hn", dims or (1, batch, 3))
    return g.model()


def numbers() -> onnx.ModelProto:
    """`x` [batch, 4], `scales` [3], `rate` [] int64, `high` [] bool -> `y` [batch, 2], of which each changes a part."""
    g = GraphWriter("numbers", seed=0, opset=15)
    x = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, 2)))
    g.input("scales", (3,))
    g.input("rate", (), TensorProto.INT64)
    g.input("high", (), TensorProto.BOOL)
    y = g.op("Mul", x, g.op("Gather", "scales", g.weight("second", [1])))
    y = g.op("Div", y, g.op("Cast", "rate", to=TensorProto.FLOAT))
    g.op("Where", "high", y, g.op("Neg", y), outputs="y")
    g.output("y", ("batch", 2))
    return g.model()


def by_onnxruntime(model: onnx.ModelProto, feed: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, feed), strict=True))


def rows(*shape: int) -> Array:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def test_a_state_with_its_rows_on_axis_1_is_fed_by_rows_and_computes_what_the_file_does() -> None:
    model = states()
    x, h = rows(6, 5, 4), rows(6, 1, 3)
    layout, changed = read_layout(model.graph, settings()), rows_first(model, settings())
    expected = by_onnxruntime(model, {"x": x, "h": layout.as_in_file("h", h)})
    found = by_onnxruntime(changed, {"x": x, "h": h})
    assert expected["hn"].shape == (1, 6, 3)
    np.testing.assert_array_equal(found["y"], expected["y"])
    np.testing.assert_array_equal(found["hn"], layout.rows_first("hn", expected["hn"]))
    assert found["hn"].shape == (6, 1, 3)
    onnx.checker.check_model(changed, full_check=True)


@pytest.mark.parametrize("value", [0, 0.25, [0.5, -1, 2], [[[0.5, -1, 2]]]])
def test_a_bound_state_is_repeated_for_each_row(value: Any) -> None:
    model, config = states(), settings(bind={"h": value})
    x = rows(6, 5, 4)
    changed, bound = rows_first(model, config), read_layout(model.graph, config).bound["h"]
    assert [each.name for each in changed.graph.input] == ["x"]
    assert bound.for_rows(6).shape == (1, 6, 3)
    expected = by_onnxruntime(model, {"x": x, "h": bound.for_rows(6)})
    by_hand = np.ones((1, 6, 3), np.float32) * np.asarray(value, np.float32)
    np.testing.assert_array_equal(bound.for_rows(6), by_hand)
    found = by_onnxruntime(changed, {"x": x})
    np.testing.assert_array_equal(found["y"], expected["y"])


def test_bound_numbers_are_no_weights_and_the_module_computes_with_them() -> None:
    config = settings(bind={"scales": [0.667, 2, 0.8], "rate": 16000, "high": False})
    x = rows(5, 4)
    changed = rows_first(numbers(), config)
    module = to_module(changed)
    assert set(module.onnx_names.values()) == {"w"}
    feed = {"x": x, "scales": np.float32([0.667, 2, 0.8]), "rate": np.array(16000), "high": np.array(False)}
    expected = by_onnxruntime(numbers(), feed)["y"]
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-6)
    weight = np.asarray(onnx.numpy_helper.to_array(numbers().graph.initializer[0]), np.float64)
    np.testing.assert_allclose(expected, -(x @ weight) * 2 / 16000, rtol=1e-5)


def test_the_axis_can_be_given_where_the_file_names_no_lengths() -> None:
    model = states(batch="", dims=(1, "", 3))
    assert read_layout(model.graph, settings()).axes == {}
    config = settings(batch_axes={"h": 1, "hn": -2})
    assert read_layout(model.graph, config).axes == {"h": 1, "hn": 1}
    assert read_layout(model.graph, settings(batch_axes={"h": 1}, bind={"h": 0})).bound["h"].shape == (1, None, 3)


def test_a_batch_that_the_file_fixes_has_its_axis_by_the_setting() -> None:
    changed = rows_first(states(batch=2), settings(batch_axes={"h": 1, "hn": 1}))
    assert [[dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in changed.graph.input] == [
        [2, 5, 4],
        [2, 1, 3],
    ]


@pytest.mark.parametrize(
    ("model", "given", "problem"),
    [
        (states(), {"bind": {"g": 0}}, "model.bind names 'g', which is not an input of the model; there is x, h"),
        (states(), {"bind": {"h": [1, 2]}}, "model.bind.h has 2 values on axis 2, but input 'h' has shape"),
        (states(), {"bind": {"h": [[1], [2]]}}, "model.bind.h has 2 values on axis 1"),
        (states(), {"bind": {"h": [[[[1]]]]}}, "model.bind.h is a list of 4 levels"),
        (states(), {"bind": {"h": 1e300}}, "model.bind.h is 1e+300, but input 'h' takes float, which does not hold it"),
        (states(), {"bind": {"h": 0, "x": 0}}, "model.bind gives all inputs of the model (x, h) a value"),
        (states(), {"batch_axes": {"q": 1}}, "model.batch_axes names 'q', which is neither an input nor an output"),
        (states(), {"batch_axes": {"h": 3}}, "model.batch_axes.h is 3, but 'h' [1, batch, 3] has axes 0 to 2"),
        (states(dims=(1, "n", 3)), {"bind": {"h": 0}}, "whose axis 1 has no length: give a list of the length that"),
        (states(dims=(1, "batch", "batch")), {}, "has the length of the batch, 'batch', on axes 1 and 2; say which"),
        (numbers(), {"bind": {"rate": 0.5}}, "model.bind.rate is 0.5, but input 'rate' takes int64"),
        (numbers(), {"bind": {"rate": True}}, "model.bind.rate is True, but input 'rate' takes int64"),
        (numbers(), {"bind": {"high": 2}}, "model.bind.high is 2, but input 'high' takes bool"),
    ],
)  # fmt: skip
def test_each_way_to_get_it_wrong_has_a_message(model: onnx.ModelProto, given: dict[str, Any], problem: str) -> None:
    assert any(problem in each for each in layout_problems(model.graph, settings(**given)))


@pytest.mark.parametrize("value", ["zeros", [[1, 2], [3]], [], {"a": 1}, None])
def test_what_is_no_array_of_numbers_is_refused_by_the_settings(value: Any) -> None:
    with pytest.raises(ValueError, match="neither a number nor a list of numbers"):
        settings(bind={"h": value})
