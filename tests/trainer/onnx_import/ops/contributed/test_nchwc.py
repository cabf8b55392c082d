"""Files in onnxruntime's blocked layout: read, trained and written back as they are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.tasks.export import export_file
from onward.trainer.diagnostics.audit_input import AuditInput
from onward.trainer.diagnostics.exporter_warnings import exporter_warnings
from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.ops.contributed.nchwc import unblocked
from tests.support import runs
from tests.support.graphs import feed, tiny_conv_net, tiny_resnet
from tests.support.trained_models import model_with_weights


def several_layouts() -> onnx.ModelProto:
    """Padded channels, a depthwise convolution, pools of every kind, upsampling, channels from 24 to 20."""
    g = GraphWriter("layouts", seed=0, opset=20)

    def conv(x, name, shape, **attributes):
        kernel = {"kernel_shape": list(shape[2:]), "pads": [shape[2] // 2] * 4}
        weights = g.weight(f"{name}.weight", g.normal(0.3, *shape)), g.weight(f"{name}.bias", g.normal(0.3, shape[0]))
        return g.op("Conv", x, *weights, **kernel, **attributes)

    x = g.op("Relu", conv(g.input("image", ("n", 3, 8, 8)), "a", (24, 3, 3, 3)))
    x = g.op("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    x = g.op("Sigmoid", conv(x, "b", (32, 24, 3, 3)))
    x = conv(x, "c", (32, 1, 3, 3), group=32)
    x = g.op("Add", x, conv(x, "d", (32, 32, 1, 1)))
    x = g.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    scales = g.weight("scales", np.float32([1, 1, 2, 2]))
    x = g.op("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    x = g.op("GlobalAveragePool", g.op("HardSwish", conv(x, "e", (20, 32, 3, 3))))
    g.op("Flatten", x, outputs="logits")
    g.output("logits", ("n", 20))
    return g.model()


MODELS = {each.__name__: each for each in (tiny_conv_net, tiny_resnet, several_layouts)}


def blocked(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The model as onnxruntime optimises it for this processor; skips where it has no blocked layout."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / "blocked.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    made = onnx.load(folder / "blocked.onnx")
    if all(node.domain != "com.microsoft.nchwc" for node in made.graph.node):
        pytest.skip("onnxruntime has no blocked layout for this processor")
    return made


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_blocked_file_computes_what_onnxruntime_computes_and_comes_back(name, tmp_path):
    model = blocked(MODELS[name](), tmp_path)
    module = to_module(model).eval()
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    inputs = feed(MODELS[name](), 3, seed=1)
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    np.testing.assert_allclose(module(*tensors).detach(), by_onnxruntime(model, inputs), rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the trained tensors are those of the file, in its order
        for weight in named_weights(module).values():
            weight += 0.1 * torch.randn_like(weight)
    written = model_with_weights(module, model)
    np.testing.assert_allclose(module(*tensors).detach(), by_onnxruntime(written, inputs), rtol=1e-3, atol=1e-4)


def test_gradients_are_those_of_the_model_before_it_was_optimised(tmp_path):
    original, model = tiny_conv_net(), blocked(tiny_conv_net(), tmp_path)
    before, after = to_module(original), to_module(model)
    x = torch.from_numpy(feed(original, 3, seed=1)["image"])
    for module in (before, after):
        module(x).square().mean().backward()
    wanted, found = named_weights(before), named_weights(after)
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    kernel, bias = (found[name] for name in first.input[1:3])
    padded = kernel.shape[0]
    gradient = unblocked(kernel.grad, padded, True)  # 8 outputs are one block
    torch.testing.assert_close(gradient[:8], wanted["features.0.weight"].grad)
    torch.testing.assert_close(bias.grad[:8], wanted["features.0.bias"].grad)
    assert not gradient[8:].any()
    assert not bias.grad[8:].any()


@pytest.mark.parametrize("block", [8, 16])
def test_blocks_are_put_in_order(block):
    weight = torch.arange(32 * 16 * 2 * 3).reshape(32, 16, 2, 3)
    stored = torch.stack(
        [
            weight[o * block + bo, i * block + bi, y, x]
            for o in range(32 // block)
            for i in range(16 // block)
            for y in range(2)
            for x in range(3)
            for bi in range(block)
            for bo in range(block)
        ]
    ).reshape(weight.shape)
    torch.testing.assert_close(unblocked(stored, block, False), weight)


def test_blocks_of_another_processor_are_refused_with_what_to_do(tmp_path, monkeypatch):
    model = blocked(tiny_conv_net(), tmp_path)  # 8 channels, padded to the blocks of this processor
    padded = next(stored_tensors(model.graph, None)[node.input[1]].shape[0] for node in model.graph.node if node.domain)
    other = "AVX2" if padded == 16 else "AVX512"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: other)
    with pytest.raises(UnsupportedModel, match=r"another kind of processor than this one.*ORT_ENABLE_EXTENDED"):
        to_module(model)


def test_doctor_says_that_the_file_is_for_one_kind_of_processor(tmp_path):
    model = blocked(tiny_conv_net(), tmp_path)
    assert "blocked_layout" in [warning.key for warning in exporter_warnings(AuditInput(model))]


@pytest.mark.parametrize("operator", ["NhwcConv", "NhwcFusedConv"])
def test_convolutions_that_only_gpus_run_are_refused_with_what_to_do(operator):
    g = GraphWriter("nhwc", seed=0)
    g.op(operator, g.input("x", ("n", 6, 5, 4)), g.weight("w", g.normal(1.0, 3, 4, 2, 2)), outputs="y")
    g.output("y", ("n", 5, 4, 3))
    graph = g._graph
    graph.node[0].domain = "com.microsoft"
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    with pytest.raises(UnsupportedModel, match="optimise the model for the CPU"):
        to_module(onnx.helper.make_model(graph, opset_imports=opsets))


@pytest.mark.mpi
@pytest.mark.slow
def test_a_run_trains_a_blocked_file(tmp_path):
    model = blocked(tiny_resnet(), tmp_path)
    run = runs.make_run(
        tmp_path / "run",
        model,
        runs.tiny_images(80),
        train={"global_batch_size": 8, "num_steps": 30},
        parallel={"data": 2},
        optimizer={"learning_rate": 3e-3},
    )
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    losses = runs.losses(run)
    assert losses[30] < 0.5 * losses[1]
    assert exported.parity < 1e-5
    after = onnx.load(exported.path)
    assert list(after.graph.node) == list(model.graph.node)
    changed = {a.name for a, b in zip(model.graph.initializer, after.graph.initializer, strict=True) if a != b}
    assert changed == set(named_weights(to_module(model)))
