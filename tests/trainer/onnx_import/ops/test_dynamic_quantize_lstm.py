"""DynamicQuantizeLSTM, which onnxruntime's quantize_dynamic makes of an LSTM: the LSTM with dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.write_back import write_model

Array = np.ndarray[Any, np.dtype[Any]]
FEATURES, HIDDEN, STEPS, BATCH = 5, 8, 12, 4


def lstm(direction: str, *, operands: bool) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """An LSTM and inputs for it. operands: with lengths, initial states and peepholes."""
    rng = np.random.default_rng(0)
    directions = 2 if direction == "bidirectional" else 1

    def some(*shape: int) -> Array:
        return (rng.standard_normal(shape) * 0.4).astype(np.float32)

    stored = {
        "W": some(directions, 4 * HIDDEN, FEATURES),
        "R": some(directions, 4 * HIDDEN, HIDDEN),
        "B": some(directions, 8 * HIDDEN),
        **({"P": some(directions, 3 * HIDDEN)} if operands else {}),
    }
    inputs: dict[str, Array] = {"X": some(STEPS, BATCH, FEATURES)}
    names = ["X", "W", "R", "B"]
    if operands:
        names += ["lengths", "h", "c", "P"]
        inputs |= {"lengths": np.array([12, 7, 1, 9], np.int32)}
        inputs |= {name: some(directions, BATCH, HIDDEN) for name in "hc"}
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    node = helper.make_node("LSTM", names, ["Y", "Y_h", "Y_c"], "lstm", hidden_size=HIDDEN, direction=direction)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, kinds[v.dtype], v.shape) for name, v in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), inputs


def quantized(model: onnx.ModelProto, folder: Path, **settings: Any) -> Path:
    onnx.save(model, folder / "float.onnx")
    # with 7 bits: on a processor without VNNI the sums of two 8-bit products in onnxruntime's kernels may saturate
    quantize_dynamic(folder / "float.onnx", folder / "quantized.onnx", reduce_range=True, **settings)
    assert [node.op_type for node in onnx.load(folder / "quantized.onnx").graph.node] == ["DynamicQuantizeLSTM"]
    return folder / "quantized.onnx"


def dequantized(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The float LSTM with the weights of the quantized file: their formula, in float64."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in copy.graph.initializer:
        if tensor.name in ("W", "R"):
            integers = stored[f"{tensor.name}_quantized"].astype(np.float64)
            scale, zero = (
                stored[f"{tensor.name}_{what}"].reshape(len(integers), 1, -1) for what in ("scale", "zero_point")
            )
            weight = ((integers - zero) * scale).transpose(0, 2, 1).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weight), tensor.name))
    return copy


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)


@pytest.mark.parametrize("operands", [False, True], ids=["plain", "lengths, states, peepholes"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    "settings", [{}, {"per_channel": True}, {"weight_type": QuantType.QUInt8}], ids=["tensor", "channel", "uint8"]
)
def test_results_and_gradients_are_those_of_the_dequantized_lstm(
    settings: dict[str, Any], direction: str, operands: bool, tmp_path: Path
) -> None:
    model, inputs = lstm(direction, operands=operands)
    path = quantized(model, tmp_path, **settings)
    plain = dequantized(model, path)
    module, reference = to_module(load_model(path)), to_module(plain)
    got = module(*map(torch.from_numpy, inputs.values()))
    kernels = by_onnxruntime(onnx.load(path), inputs)
    for ours, exact, rounded in zip(got, by_onnxruntime(plain, inputs), kernels, strict=True):
        assert np.abs(ours.detach().numpy() - exact).max() <= 2e-6 * np.abs(exact).max()
        # x and h are rounded to 8 bits by onnxruntime's kernel
        assert np.abs(ours.detach().numpy() - rounded).max() <= 0.05 * np.abs(rounded).max()
    found, wanted = (gradients(each, inputs) for each in (module, reference))
    assert found.keys() == wanted.keys() - {"W", "R"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def gradients(module: torch.nn.Module, inputs: dict[str, Array]) -> dict[str, torch.Tensor]:
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    floats = {name: value.requires_grad_() for name, value in given.items() if value.is_floating_point()}
    results = module(*given.values())
    sum((y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum() for y in results).backward()
    found = dict(module.named_parameters()) | floats
    return {name: tensor.grad for name, tensor in found.items() if tensor.grad is not None}


def test_integers_stay_in_memory_and_the_bias_is_trained_and_written_back(tmp_path: Path) -> None:
    model, inputs = lstm("forward", operands=False)
    path = quantized(model, tmp_path, per_channel=True)
    source = load_model(path)
    module = to_module(source)
    assert {name: role.kind for name, role in module.roles.items() if role.kind == "trained"} == {"B": "trained"}
    assert sorted(str(b.dtype) for b in module.buffers() if b.ndim == 3) == ["torch.int8", "torch.int8"]
    with torch.no_grad():
        dict(module.named_parameters())["B"] += 0.1
    write_model(module, source, path, tmp_path / "after.onnx")
    (y, *_), (want, *_) = (
        module(*map(torch.from_numpy, inputs.values())),
        by_onnxruntime(onnx.load(tmp_path / "after.onnx"), inputs),
    )
    assert np.abs(y.detach().numpy() - want).max() <= 0.05 * np.abs(want).max()
    before, after = ({t.name: t for t in m.graph.initializer} for m in (source, onnx.load(tmp_path / "after.onnx")))
    assert [name for name in before if before[name] != after[name]] == ["B"]
