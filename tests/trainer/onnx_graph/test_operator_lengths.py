"""Files whose inputs are dynamic in every dimension, although their operators admit one number of channels only."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onward.trainer.onnx_graph.operator_lengths import known_lengths, with_lengths
from onward.trainer.onnx_import.driver import to_module
from tests.support.foreign_files import FILES
from tests.support.trained_models import model_with_weights

HEADER = '<ir_version: 9, opset_import: ["" : 17]>\n'


def parsed(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def assert_computed(model: onnx.ModelProto, *shapes: tuple[int, ...]) -> None:
    """At each shape the module computes what onnxruntime computes, and writes the file back as it was."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    module = to_module(model).eval()
    for shape in shapes:
        x = random(*shape)
        (want,) = session.run(None, {"x": x})
        torch.testing.assert_close(module(torch.from_numpy(x)), torch.from_numpy(want))
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()


def conv(group: int = 1) -> onnx.ModelProto:
    return parsed(
        f"""net (float[n, c, h, w] x) => (float[n, k, p, q] y) {{
            float_x = Cast <to = 1> (x)
            small = Div (float_x, most)
            z = Conv <group = {group}> (small, weight)
            y = Relu (z)
        }}""",
        weight=random(4, 3, 3, 3),
        most=np.array(255, np.float32),
    )


@pytest.mark.parametrize("group", [1, 2])
def test_channels_that_a_convolution_reads_are_those_of_its_weight_and_sizes_stay_dynamic(group: int) -> None:
    model = conv(group)
    assert known_lengths(model.graph) == {("x", 1): 3 * group}
    assert_computed(model, (2, 3 * group, 8, 9), (5, 3 * group, 13, 7))


@pytest.mark.parametrize(
    ("text", "shape", "length"),
    [
        ("net (float[n, f] x) => (float[n, k] y) { y = MatMul (x, weight) }", (6, 4), 6),
        ("net (float[n, l, f] x) => (float[n, l, k] y) { y = MatMul (x, weight) }", (6, 4), 6),
        ("net (float[n, f] x) => (float[n, k] y) { y = Gemm <transB = 1> (x, weight) }", (4, 6), 6),
        ("net (float[n, f, l] x) => (float[n, k, m] y) { y = ConvTranspose (x, weight) }", (5, 2, 3), 5),
    ],
)
def test_features_that_a_layer_reads_are_those_of_its_weight(text: str, shape: tuple[int, ...], length: int) -> None:
    model = parsed(text, weight=random(*shape))
    (known,) = known_lengths(model.graph).items()
    assert known[1] == length
    sizes = [[2, 5, 7], [3, 9, 4]]
    shapes = [[known[1] if at == known[0][1] else size for at, size in enumerate(some)] for some in sizes]
    rank = len(model.graph.input[0].type.tensor_type.shape.dim)
    assert_computed(model, *(tuple(each[:rank]) for each in shapes))


def test_a_transformer_of_images_whose_file_declares_every_dimension_dynamic_runs_at_its_size() -> None:
    file = FILES["optimum-vit"]
    dims = onnx.load(file.path).graph.input[0].type.tensor_type.shape.dim
    assert all(dim.dim_param for dim in dims)
    model, module = onnx.load(file.path), to_module(onnx.load(file.path)).eval()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (2, 5):
        inputs = file.feed(batch)
        (want,) = session.run(None, inputs)
        torch.testing.assert_close(module(torch.from_numpy(inputs["pixel_values"])), torch.from_numpy(want))


def test_declared_lengths_and_the_batch_are_left_alone_and_the_file_is_not_changed() -> None:
    model = conv()
    before = model.SerializeToString()
    declared = with_lengths(model, known_lengths(model.graph))
    assert [dim.dim_value for dim in declared.graph.input[0].type.tensor_type.shape.dim] == [0, 3, 0, 0]
    assert known_lengths(declared.graph) == {}
    assert with_lengths(declared, {}) is declared
    assert model.SerializeToString() == before
