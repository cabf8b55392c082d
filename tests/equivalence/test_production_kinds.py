"""Files of the kinds that published packages ship: values, gradients and the written file are those of onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.onnx_import.write_back import write_model
from tests.support.production_kinds import KINDS

Array = np.ndarray[Any, np.dtype[Any]]


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    options = onnxruntime.SessionOptions()
    # its optimiser rounds the activations of products with int8 weights
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, feeds)
    return np.asarray(result)


def computed(module: ImportedGraph, feeds: dict[str, Array]) -> torch.Tensor:
    result: torch.Tensor = module(*(torch.from_numpy(feeds[name]) for name in module.input_names))
    return result


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_onnxruntime_at_every_size(name: str) -> None:
    model, module = KINDS[name].build(), to_module(KINDS[name].build()).eval()
    for shapes in KINDS[name].tried:
        feeds = KINDS[name].feeds(shapes)
        expected, found = run(model, feeds), computed(module, feeds).detach().numpy()
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(abs(expected).max())))


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_the_differences_that_onnxruntime_computes(name: str) -> None:
    """The derivative of a weighted sum of the output along the signs of the gradient of each float weight."""
    model = KINDS[name].build()
    module = to_module(model).eval()
    feeds = KINDS[name].feeds(KINDS[name].tried[0])
    result = computed(module, feeds)
    direction = np.random.default_rng(3).standard_normal(tuple(result.shape))
    (result * torch.from_numpy(direction)).sum().backward()
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    checked = 0
    for path, parameter in module.named_parameters():
        tensor = stored[module.onnx_names[path]]
        if tensor.data_type != onnx.TensorProto.FLOAT or parameter.grad is None:
            continue
        if parameter.grad.abs().max() < 1e-3:  # less than what fp32 rounds in the differences
            continue
        value = numpy_helper.to_array(tensor).copy()
        along = np.sign(parameter.grad.numpy()).reshape(value.shape)
        step = 1e-3 * max(1e-2, float(abs(value).max()))
        sums = []
        for sign in (1, -1):
            tensor.CopyFrom(numpy_helper.from_array((value + sign * step * along).astype(np.float32), tensor.name))
            sums.append(float((run(model, feeds).astype(np.float64) * direction).sum()))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        expected = float(parameter.grad.abs().sum())
        assert (sums[0] - sums[1]) / (2 * step) == pytest.approx(expected, rel=0.05, abs=0.02), path
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("name", KINDS)
def test_the_written_file_is_the_same_file(name: str, tmp_path: Path) -> None:
    onnx.save_model(KINDS[name].build(), tmp_path / "model.onnx")
    model = onnx.load_model(tmp_path / "model.onnx")
    write_model(to_module(model), model, tmp_path / "model.onnx", tmp_path / "written.onnx")
    assert (tmp_path / "written.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
