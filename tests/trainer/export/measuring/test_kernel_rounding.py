"""What onnxruntime's kernels round is measured, said and allowed; an error as small as it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from onward.trainer.export.measuring import kernel_rounding
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.kernel_rounding import exact_form
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_import.driver import to_module
from tests.support import graphs
from tests.support.packed import matmul_nbits, mixture
from tests.trainer.export.measuring.test_onnx_runner import Rows, data
from tests.trainer.onnx_import.ops.test_dynamic_quantize_lstm import lstm, quantized

TOLERANCE = 1e-4


def blocked(folder: Path) -> tuple[onnx.ModelProto, tuple[Tensor, ...]]:
    """Weights of 8 bits in blocks behind DequantizeLinear, which onnxruntime makes MatMulNBits of."""
    rng = np.random.default_rng(0)
    stored = {
        "q": rng.integers(-127, 128, (32, 6)).astype(np.int8),
        "s": (rng.random((2, 6)) * 0.05 + 0.02).astype(np.float32),
        "z": np.zeros((2, 6), np.int8),
        "b": rng.standard_normal(6).astype(np.float32),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", d]) for n, d in (("x", 32), ("y", 6))]
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model, (torch.from_numpy(rng.standard_normal((8, 32)).astype(np.float32)),)


def nbits(folder: Path) -> tuple[onnx.ModelProto, tuple[Tensor, ...]]:
    model, _ = matmul_nbits(zero="packed", level=4)
    return model, (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)),)


def recurrent(folder: Path) -> tuple[onnx.ModelProto, tuple[Tensor, ...]]:
    model, inputs = lstm("bidirectional", operands=False)
    del model.graph.output[1:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", "b", 5]))
    return onnx.load(quantized(model, folder, per_channel=True)), (torch.from_numpy(inputs["X"]),)


def experts(folder: Path, bits: int = 8) -> tuple[onnx.ModelProto, tuple[Tensor, ...]]:
    model, _, inputs = mixture(bits=bits, has_zero=True, level=4)
    return model, tuple(map(torch.from_numpy, inputs.values()))


def experts_of_4_bits(folder: Path) -> tuple[onnx.ModelProto, tuple[Tensor, ...]]:
    return experts(folder, 4)


Make = Callable[[Path], tuple[onnx.ModelProto, tuple[Tensor, ...]]]
KINDS = [blocked, nbits, recurrent, experts, experts_of_4_bits]


def rows(inputs: tuple[Tensor, ...]) -> EvaluationData:
    return data(Rows(inputs, (None,), len(inputs[0])))


def by_onnxruntime(model: onnx.ModelProto, inputs: tuple[Tensor, ...]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (each.numpy() for each in inputs), strict=True)))[0]


@pytest.mark.parametrize("make", KINDS)
def test_the_rounding_of_kernels_is_measured_said_and_allowed(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = make(tmp_path)
    module = to_module(model).eval()
    runner = OnnxRunner(model, rows(inputs))
    assert runner.compare(module, batches=1, tolerance=TOLERANCE) == []
    # the module rounds nothing, so the rounding is what separates the file from it: in one row, or in all
    ours = module(*inputs).detach().numpy()
    apart = np.abs(ours - by_onnxruntime(model, inputs)).max() / np.abs(ours).max()
    assert TOLERANCE < apart <= runner.rounding * 1.001
    assert runner.rounding < 0.05
    assert runner.parity <= runner.rounding + 2 * TOLERANCE
    assert f"kernels round inside this file by {runner.rounding:.2g}" in caplog.text


class Scaled(nn.Module):
    """A module whose results are off by a factor."""

    def __init__(self, module: nn.Module, factor: float) -> None:
        super().__init__()
        self.module, self.factor = module, factor

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs) * self.factor


@pytest.mark.parametrize("make", KINDS)
def test_an_error_smaller_than_the_rounding_is_refused(make: Make, tmp_path: Path) -> None:
    model, inputs = make(tmp_path)
    runner = OnnxRunner(model, rows(inputs))
    wrong = Scaled(to_module(model), 1.001).eval()
    problems = runner.compare(wrong, batches=1, tolerance=TOLERANCE)
    assert problems
    for problem in problems:
        assert "that does not explain it: without their rounding, output" in problem
        assert "is 0.00" in problem
    assert runner.rounding == 0.0


def test_more_than_a_rounding_is_refused_with_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = blocked(tmp_path)
    monkeypatch.setattr(kernel_rounding, "MOST_ROUNDING", 1e-3)
    (problem,) = OnnxRunner(model, rows(inputs)).compare(to_module(model), batches=1, tolerance=TOLERANCE)
    assert "its kernels (1 MatMul with DequantizeLinear) round by 0.00" in problem
    assert "at most 0.001 is allowed" in problem
    assert "accuracy_level below 4, or raise export.tolerance" in problem


def test_files_without_such_kernels_have_no_allowance() -> None:
    assert exact_form(graphs.tiny_mlp()) is None
    runner = OnnxRunner(graphs.tiny_mlp(), rows((torch.randn(3, 4),)))
    (problem,) = runner.compare(Scaled(to_module(graphs.tiny_mlp()), 1.001), batches=1, tolerance=TOLERANCE)
    assert "round" not in problem
    # activations that the file quantizes itself are rounded by the module, too
    static, _ = blocked(Path())
    static.graph.node.insert(0, helper.make_node("DequantizeLinear", ["xq", "xs"], ["x"]))
    assert exact_form(static) is None


def test_a_file_with_external_data_is_measured_without_loading_it(tmp_path: Path) -> None:
    model, inputs = nbits(tmp_path)
    module = to_module(model)
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="m.data")
    runner = OnnxRunner(ModelFile.read(path), rows(inputs))
    assert runner.compare(module, batches=1, tolerance=TOLERANCE) == []
    assert runner.rounding > TOLERANCE
    form = exact_form(ModelFile.read(path))
    assert form is not None
    assert isinstance(form.model, onnx.ModelProto)
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in form.model.graph.initializer)
