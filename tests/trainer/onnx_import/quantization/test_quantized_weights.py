"""Weights stored as integers: trained as floats, computed rounded, written back as integers with the file's scales."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper, parser

from onward.tasks.export import export_file
from onward.trainer.diagnostics.doctor import diagnose
from onward.trainer.errors import ConfigError
from onward.trainer.export.file_verification import weight_problems
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.onnx_import.write_back import write_model
from tests.support import runs
from tests.support.graphs import feed, tiny_conv_net
from tests.support.quantized import FORMATS, MODELS, quantized
from tests.support.trained_models import model_with_weights


def by_onnxruntime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    # otherwise it fuses what is quantized and back, and rounds elsewhere
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)[0]


def ours(module, inputs):
    return module(*(torch.from_numpy(inputs[name]) for name in module.input_names))


def steps(module, model, count=5, learning_rate=0.02):
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=learning_rate)
    for seed in range(count):
        optimizer.zero_grad()
        ours(module, feed(model, 8, seed=seed)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_what_trains_in_the_float_model_trains_in_the_quantized_one(name, form):
    model = quantized(name, form)
    module = to_module(model).eval()
    trained = {each.removesuffix("_quantized") for each, p in named_weights(module).items() if p.requires_grad}
    wanted = {each for each, p in named_weights(to_module(MODELS[name]())).items() if p.requires_grad}
    assert trained == wanted
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    inputs = feed(MODELS[name](), 5, seed=9)
    y = ours(module, inputs)
    largest = np.abs(y.detach().numpy()).max()
    # a value on the border of two integers may be rounded to either
    np.testing.assert_allclose(y.detach(), by_onnxruntime(model, inputs), atol=0.02 * largest)
    y.square().mean().backward()
    assert {each for each, p in named_weights(module).items() if p.grad is not None and p.grad.any()} >= {
        each for each, p in named_weights(module).items() if p.requires_grad
    }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("per_channel", [True, False])
def test_the_written_file_computes_what_the_trained_module_computes(form, per_channel):
    model = quantized(form=form, per_channel=per_channel)
    module = to_module(model).train()
    steps(module, tiny_conv_net())
    written = model_with_weights(module.eval(), model)
    inputs = feed(tiny_conv_net(), 5, seed=9)
    np.testing.assert_allclose(ours(module, inputs).detach(), by_onnxruntime(written, inputs), atol=1e-5)
    assert list(written.graph.node) == list(model.graph.node)
    changed = {a.name for a, b in zip(model.graph.initializer, written.graph.initializer, strict=True) if a != b}
    assert changed == set(named_weights(module))
    # and once more: the file is a starting point for training like the first one
    again = to_module(written).eval()
    np.testing.assert_array_equal(ours(again, inputs).detach(), ours(module, inputs).detach())


HEAD = '<ir_version: 9, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y) '
CODES = np.int8([[10, -128], [0, 127], [-7, 3]])


def dense(body="w = DequantizeLinear<axis = 1>(q, s, z) y = MatMul(x, w)", codes=CODES, **stored):
    model = parser.parse_model(HEAD + "{ " + body + " }")
    given = {"q": codes, "s": np.float32([0.1, 0.03]), "z": np.array([2, 0], codes.dtype)} | stored
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in given.items())
    return model


def stored(model, name="q"):
    return next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)


def test_weights_are_rounded_to_the_nearest_integer_and_clamped():
    model = dense()
    module = to_module(model)
    dequantized = (CODES - np.int32([2, 0])) * np.float32([0.1, 0.03])
    torch.testing.assert_close(module.q.detach(), torch.from_numpy(dequantized).float())
    with torch.no_grad():
        module.q[0, 0] += 0.26  # 2.6 scales
        module.q[1, 0] += 0.04  # less than half a scale is lost
        module.q[0, 1] -= 5.0  # below the least integer
        module.q[1, 1] += 5.0
    np.testing.assert_array_equal(stored(model_with_weights(module, model)), [[13, -128], [0, 127], [-7, 3]])


def test_updates_below_half_a_scale_add_up():
    model = dense()
    module = to_module(model)
    for _ in range(4):
        with torch.no_grad():
            module.q[0, 0] += 0.04
    assert stored(model_with_weights(module, model))[0, 0] == 12


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32])
@pytest.mark.parametrize("how", ["raw", "typed", "constant"])
def test_integers_of_every_type_come_back(kind, how):
    info = np.iinfo(kind)
    codes = np.random.default_rng(0).integers(info.min, info.max, (3, 2), kind, endpoint=True)
    zeros = {"z": np.zeros(2, kind)}
    model = dense(codes=codes, **zeros)
    if how == "typed":
        proto = onnx.helper.make_tensor("q", onnx.helper.np_dtype_to_tensor_dtype(codes.dtype), [3, 2], codes.flatten())
        model.graph.initializer[0].CopyFrom(proto)
    if how == "constant":
        proto = model.graph.initializer.pop(0)
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["q"], value=proto))
    module = to_module(model)
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    with torch.no_grad():
        module.q[1] = 0
    back = model_with_weights(module, model)
    array = numpy_helper.to_array(back.graph.node[0].attribute[0].t) if how == "constant" else stored(back)
    assert array.dtype == kind
    np.testing.assert_array_equal(array, np.where([[False], [True], [False]], 0, codes))


def test_integers_in_external_files_come_back(tmp_path):
    onnx.save(dense(), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    model = load_model(tmp_path / "m.onnx")
    module = to_module(model, base=tmp_path)
    (tmp_path / "same").mkdir()
    write_model(module, model, tmp_path / "m.onnx", tmp_path / "same" / "m.onnx")
    assert (tmp_path / "same" / "m.bin").read_bytes() == (tmp_path / "m.bin").read_bytes()
    with torch.no_grad():
        module.q[0, 0] += 0.26
    (tmp_path / "new").mkdir()
    write_model(module, model, tmp_path / "m.onnx", tmp_path / "new" / "m.onnx")
    before, after = ((tmp_path / each / "m.bin").read_bytes() for each in ("same", "new"))
    assert [a - b for a, b in zip(after, before, strict=True) if a != b] == [3]


def test_gradients_are_those_of_fake_quantization():
    module = to_module(dense())
    with torch.no_grad():
        module.q[0, 1] = -9.0  # clamped: no gradient
    x = torch.randn(4, 3)
    module(x).square().sum().backward()
    w = module.q.detach().clone().requires_grad_()
    scale, zero = torch.tensor([0.1, 0.03]), torch.tensor([2, 0], dtype=torch.int32)
    rounded = torch.fake_quantize_per_channel_affine(w, scale, zero, 1, -128, 127)
    (x @ rounded).square().sum().backward()
    torch.testing.assert_close(module.q.grad, w.grad)


# name: (nodes, what else is stored)
FROZEN = {
    "two nodes disagree on the scale": (
        "w = DequantizeLinear<axis = 1>(q, s, z) v = DequantizeLinear<axis = 1>(q, s2, z) a = MatMul(x, w)"
        " b = MatMul(x, v) y = Add(a, b)",
        {"s2": np.float32([0.2, 0.2])},
    ),
    "the scale is computed": (
        "m = ReduceMax<keepdims = 0>(x) w = DequantizeLinear(q, m, z1) y = MatMul(x, w)",
        {"z1": np.int8(0)},
    ),
    "a scale is 0": (
        "w = DequantizeLinear<axis = 1>(q, s0, z) y = MatMul(x, w)",
        {"s0": np.float32([0.2, 0])},
    ),
}


@pytest.mark.parametrize("why", FROZEN)
def test_integers_without_one_stored_scale_stay_frozen(why, tmp_path):
    body, more = FROZEN[why]
    model = dense(body, **more)
    module = to_module(model)
    assert "q" not in named_weights(module)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), by_onnxruntime(model, {"x": x}), rtol=1e-5)


def test_integers_whose_scale_is_trained_stay_frozen():
    module = to_module(dense(), train=["s"])
    assert set(named_weights(module)) == {"s"}
    assert module.roles["q"].reason == "stored as integers, whose scale s is trained"


def test_weights_of_another_scale_in_the_rest_of_the_file_are_refused():
    module = to_module(dense())
    body, more = FROZEN["two nodes disagree on the scale"]
    with pytest.raises(ConfigError, match="'q' is stored as integers that nodes outside of the trained part read"):
        model_with_weights(module, dense(body, **more))


def test_doctor_says_that_small_updates_are_lost(tmp_path):
    onnx.save(quantized(), tmp_path / "m.onnx")
    found = diagnose(tmp_path / "m.onnx")
    assert found.importable
    assert {w.stored_as for w in found.weights if w.kind == "trained"} == {"int8", "int32"}
    said = {each.key: each.what for each in found.warnings}
    assert not {"nothing_to_train", "quantized"} & said.keys()  # zero points are no weights
    assert "less than half a scale are lost" in said["integer_weights"]


def test_the_gate_refuses_integers_that_are_not_the_nearest(tmp_path):
    model = dense()
    module = to_module(model)
    onnx.save(model, tmp_path / "m.onnx")
    written = ModelFile.read(tmp_path / "m.onnx")
    weights = {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}
    assert weight_problems(written, weights) == []
    weights["q"][2, 0] += 0.06  # more than half a scale
    [problem] = weight_problems(written, weights)
    assert problem == "initializer 'q' is up to 0.6 scales from the checkpoint; rounding is 0.5"
    weights["q"][2, 0] = float("nan")
    assert len(weight_problems(written, weights)) == 1


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_run_trains_a_quantized_file(form, tmp_path):
    model = quantized(form=form)
    run = runs.make_run(
        tmp_path,
        model,
        runs.tiny_images(80),
        train={"global_batch_size": 8, "num_steps": 30, "gradient_accumulation_steps": 2},
        parallel={"data": 2},
        optimizer={"learning_rate": 3e-3},
        quantize={"scales": "frozen"},
    )
    exported = export_file(run, run.checkpoint(runs.train_run(run).step))
    losses = runs.losses(run)
    assert losses[30] < 0.2 * losses[1]
    assert exported.parity < 1e-5
    after = onnx.load(exported.path)
    assert list(after.graph.node) == list(model.graph.node)
    changed = {a.name for a, b in zip(model.graph.initializer, after.graph.initializer, strict=True) if a != b}
    assert changed == set(named_weights(to_module(model)))
    kinds = {tensor.data_type for tensor in after.graph.initializer if tensor.name in changed}
    assert kinds == {TensorProto.INT8, TensorProto.INT32}
