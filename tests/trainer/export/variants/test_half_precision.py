"""Files that compute in half precision, and the comparison with onnxruntime's CUDA provider, which the CPU's stands in
for here: tests/gpu/test_settings.py has a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring import cuda_provider
from onward.trainer.export.measuring.cuda_provider import check_on_cuda
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.variants import variants
from onward.trainer.export.variants.half_precision import in_half_precision
from onward.trainer.export.variants.variants import make_variant
from onward.trainer.onnx_graph.files import onnxruntime_session
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.node_builder import GraphWriter
from tests.support import graphs
from tests.trainer.export.variants.test_variants import Rows, new_metrics


def written(model: onnx.ModelProto, folder: Path) -> tuple[Path, EvaluationData]:
    torch.manual_seed(0)
    rows = [Rows((torch.randn(6, 3, 8, 8),), (torch.arange(6) % 4,), 6) for _ in range(3)]
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path, EvaluationData(batches=lambda: rows, new_metrics=new_metrics)


@pytest.mark.parametrize("build", [graphs.tiny_bert, graphs.tiny_llama, graphs.tiny_resnet, graphs.tiny_decoder])
def test_products_compute_in_half_precision_between_ends_of_fp32(build: Any) -> None:
    model = build()
    half = in_half_precision(build())
    onnx.checker.check_model(half, full_check=True)
    for ours, theirs in zip(
        (model.graph.input, model.graph.output), (half.graph.input, half.graph.output), strict=True
    ):
        assert [(each.name, each.type) for each in ours] == [(each.name, each.type) for each in theirs]
    types = {
        each.name: each.type.tensor_type.elem_type for each in onnx.shape_inference.infer_shapes(half).graph.value_info
    }
    types |= {each.name: each.data_type for each in half.graph.initializer}
    products = [node for node in half.graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    assert products
    for node in products:
        assert {types.get(name, TensorProto.FLOAT16) for name in node.input if name} == {TensorProto.FLOAT16}, node.name


def test_unnamed_nodes_that_stay_in_fp32_get_casts_of_their_own() -> None:
    g = GraphWriter("two maxima")
    x = g.input("x", ("batch", 8))
    first = g.op("MatMul", x, g.weight("w", np.eye(8, dtype=np.float32)))
    second = g.op("Relu", first)
    together = [g.op("Max", first, second), g.op("Max", second, first), g.op("Max", first, x)]
    g.output(g.op("Sum", *together), ("batch", 8))
    model = g.model()
    for node in model.graph.node:
        node.name = ""
    feed = {"x": np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)}
    expected = open_session(model).run(None, feed)[0]
    np.testing.assert_allclose(open_session(in_half_precision(model)).run(None, feed)[0], expected, atol=5e-3)


@pytest.mark.parametrize(
    ("nodes", "weight", "reason"),
    [
        ("Add", np.ones(4, np.float32), "there is nothing to gain: the graph has no MatMul, Gemm, Conv"),
        ("MatMul", np.eye(4, dtype=np.float16), "the file has no fp32 weight"),
    ],
)
def test_a_file_that_gains_nothing_is_refused(nodes: str, weight: Any, reason: str) -> None:
    element = helper.np_dtype_to_tensor_dtype(weight.dtype)
    x, y = (helper.make_tensor_value_info(name, element, ["batch", 4]) for name in ("x", "y"))
    graph = helper.make_graph(
        [helper.make_node(nodes, ["x", "w"], ["y"])], "g", [x], [y], [numpy_helper.from_array(weight, "w")]
    )
    with pytest.raises(ExportRefused, match=reason):
        in_half_precision(helper.make_model(graph))


def scaled(name: str, factor: float) -> onnx.ModelProto:
    model = graphs.tiny_conv_net()
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.float32(factor) * numpy_helper.to_array(tensor), tensor.name))
    return model


def test_a_file_whose_products_overflow_in_half_precision_is_refused_though_a_cpu_would_hide_it(tmp_path: Path) -> None:
    path, data = written(scaled("classifier.weight", 1e6), tmp_path)
    variant = make_variant("fp16_compute", path, data=data, tolerance=0.5)
    assert "beyond fp16's 65504: " in variant.refused
    assert "a GPU would compute inf" in variant.refused
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_loses_too_much_in_half_precision_is_refused_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = written(graphs.tiny_conv_net(), tmp_path)
    monkeypatch.setattr(variants, "in_half_precision", lambda _: in_half_precision(scaled("classifier.weight", -9.0)))
    variant = make_variant("fp16_compute", path, data=data, tolerance=0.02)
    assert "evaluation/accuracy 0." in variant.refused
    assert "above export.variant_tolerance" in variant.refused
    assert list(tmp_path.iterdir()) == [path]


# -- a device beside the CPU


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU provider in the place of CUDA's."""
    monkeypatch.setitem(onnxruntime_session.PROVIDERS, "cuda", "CPUExecutionProvider")
    monkeypatch.setitem(onnxruntime_session.OPTIONS, "cuda", {})


@pytest.mark.usefixtures("stand_in")
def test_the_exported_file_is_compared_with_itself_on_the_other_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = written(graphs.tiny_conv_net(), tmp_path)
    runner = OnnxRunner(ModelFile.read(path), data)
    check = check_on_cuda(runner, batches=2, tolerance=1e-3)
    assert check is not None
    assert (check.difference, check.not_run) == (0.0, "")

    def wrong(self: OnnxRunner, device: str) -> OnnxRunner:
        model = onnx.load(path)
        tensor = next(each for each in model.graph.initializer if each.name == "classifier.weight")
        tensor.CopyFrom(numpy_helper.from_array(1.1 * numpy_helper.to_array(tensor), tensor.name))
        return OnnxRunner(model, data)

    monkeypatch.setattr(OnnxRunner, "on", wrong)
    with pytest.raises(ExportRefused, match=r"is 0\.\d+ off its CPU provider, above export.tolerance 0.001"):
        check_on_cuda(runner, batches=2, tolerance=1e-3)


@pytest.mark.usefixtures("stand_in")
def test_a_variant_in_half_precision_is_measured_on_the_other_device(tmp_path: Path) -> None:
    path, data = written(graphs.tiny_conv_net(), tmp_path)
    variant = make_variant("fp16_compute", path, data=data, tolerance=0.1)
    assert not variant.refused
    assert variant.cuda is not None
    assert variant.cuda.metrics == variant.metrics
    assert variant.cuda.difference == 0.0
    assert not variant.cuda.latency_ratio <= 0, "NaN where the machine is too busy to tell"
    assert make_variant("fp16", path, data=data, tolerance=0.1).cuda is None


def test_a_cuda_provider_that_cannot_start_is_recorded_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = written(graphs.tiny_conv_net(), tmp_path)
    runner = OnnxRunner(ModelFile.read(path), data)
    monkeypatch.setattr(cuda_provider, "has_cuda", lambda: True)
    check = check_on_cuda(runner, batches=2, tolerance=1e-3)
    assert check is not None
    assert "onnxruntime cannot run it on CUDAExecutionProvider" in check.not_run


@pytest.mark.skipif(cuda_provider.has_cuda(), reason="onnxruntime has a CUDA provider here")
def test_without_a_cuda_provider_nothing_is_compared(tmp_path: Path) -> None:
    assert "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
    path, data = written(graphs.tiny_conv_net(), tmp_path)
    assert check_on_cuda(OnnxRunner(ModelFile.read(path), data), batches=2, tolerance=1e-3) is None
    assert make_variant("fp16_compute", path, data=data, tolerance=0.1).cuda is None
