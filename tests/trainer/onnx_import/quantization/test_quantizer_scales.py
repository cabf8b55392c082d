"""Scales and zero points of QuantizeLinear and DequantizeLinear that follow what is trained."""

from __future__ import annotations

import copy
import math

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser

from onward.trainer.export.file_verification import weight_problems
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights, stored_weights
from onward.trainer.onnx_import.quantization.quantizer_scales import MOMENTUM
from tests.support.graphs import feed
from tests.support.quantized import MODELS, quantized
from tests.support.trained_models import model_with_weights
from tests.trainer.onnx_import.quantization.test_quantized_weights import by_onnxruntime, ours

MODES = ("recalibrate", "train")


def small(body, **stored):
    model = parser.parse_model(HEAD + "{" + body + "}")
    given = {"w": WEIGHT, "sx": 0.1, "zx": np.uint8(128), "sw": [0.01, 0.02], "zw": np.int8([0, 0])} | stored
    for name, value in given.items():
        value = np.asarray(value)
        value = value.astype(np.float32) if value.dtype == np.float64 else value
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


HEAD = '<ir_version: 9, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y) '
WEIGHT = np.float32([[0.5, -1.2], [0.3, 2.0], [-1.0, 0.1]])
"""Of [3, 2]: the greatest of the columns are 1.0 and 2.0."""
PRODUCT = (
    "xq = QuantizeLinear(x, sx, zx) xd = DequantizeLinear(xq, sx, zx) wq = QuantizeLinear<axis = 1>(w, sw, zw) "
    "wd = DequantizeLinear<axis = 1>(wq, sw, zw) y = MatMul(xd, wd)"
)


def learn(module, inputs, target=3.0, count=20, learning_rate=0.02):
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=learning_rate)
    for batch in inputs * count:
        optimizer.zero_grad()
        (ours(module.train(), batch) - target).square().mean().backward()
        optimizer.step()
    return module.eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tiny_conv_net", *(pytest.param(n, marks=pytest.mark.slow) for n in [*MODELS][1:])])
def test_an_untrained_file_goes_back_byte_for_byte_and_computes_what_frozen_scales_compute(name, mode):
    model, inputs = quantized(name), feed(MODELS[name](), 5, seed=3)
    module = to_module(model, scales=mode).eval()
    assert len(module.quantizers) >= 10
    assert model_with_weights(module, model).SerializeToString() == model.SerializeToString()
    np.testing.assert_array_equal(ours(module, inputs).detach(), ours(to_module(model).eval(), inputs).detach())


@pytest.mark.parametrize("mode", MODES)
def test_the_written_file_has_the_trained_scales_and_computes_the_same(mode):
    model, inputs = quantized(), feed(MODELS["tiny_conv_net"](), 5, seed=9)
    module = learn(to_module(model, scales=mode), [feed(MODELS["tiny_conv_net"](), 8, seed=0)], count=5)
    written = model_with_weights(module, model)
    np.testing.assert_allclose(ours(module, inputs).detach(), by_onnxruntime(written, inputs), atol=1e-5)
    assert list(written.graph.node) == list(model.graph.node)
    before, after = ({t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, written))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {each.scale for each in module.quantizers} <= changed
    assert all(before[name].dtype == after[name].dtype for name in before)
    for each in module.quantizers:  # what onnxruntime's kernels take for granted
        if each.kind == "bias":
            x, w = (after[name] for name in each.reads)
            np.testing.assert_array_equal(after[each.scale], np.broadcast_to(x * w, after[each.scale].shape))
    # and once more: the file is a starting point like the first one
    again = to_module(written, scales=mode).eval()
    np.testing.assert_array_equal(ours(again, inputs).detach(), ours(module, inputs).detach())
    assert model_with_weights(again, written).SerializeToString() == written.SerializeToString()


def test_outputs_grow_beyond_the_range_of_the_file_unless_scales_are_frozen():
    """The logits of an untrained model are small, and so is the range that calibration gives them."""
    model, inputs = quantized(), [feed(MODELS["tiny_conv_net"](), 8, seed=0)]
    losses = {}
    for mode in ("frozen", "recalibrate"):
        module = learn(to_module(model, scales=mode), inputs, target=10.0, count=60)
        losses[mode] = (ours(module, inputs[0]) - 10.0).square().mean().item()
    assert losses["frozen"] > 40.0
    assert losses["recalibrate"] < 1.0


def test_ranges_are_moving_averages_and_zero_points_follow_them():
    model = small(PRODUCT)
    module = to_module(model, scales="recalibrate")
    x = torch.tensor([[1.0, 4.0, 40.0], [0.0, -2.0, 5.0]])
    before = named_weights(module)["sx.range"].clone()
    torch.testing.assert_close(before, torch.tensor([-12.8, 12.7]))
    module.train()(x)
    after = named_weights(module)["sx.range"]
    torch.testing.assert_close(after, before + MOMENTUM * (torch.tensor([-2.0, 40.0]) - before))
    written = {t.name: numpy_helper.to_array(t) for t in model_with_weights(module, model).graph.initializer}
    least, greatest = after.tolist()
    assert written["sx"] == pytest.approx((greatest - least) / 255)
    assert written["zx"] == round(-least / float(written["sx"]))
    assert written["zx"].dtype == np.uint8
    # in training the micro-batch's own range: nothing is cut off
    exact = x @ torch.from_numpy(WEIGHT)
    torch.testing.assert_close(module.train()(x), exact, atol=0.6, rtol=0.05)
    module.eval()(x)
    torch.testing.assert_close(named_weights(module)["sx.range"][1], after[1])


def test_what_the_file_cuts_off_below_0_is_cut_off_after_recalibration():
    """onnxruntime's quantizer removes a Relu in front of a QuantizeLinear whose zero point is the least integer."""
    model = small(PRODUCT, zx=np.uint8(0))
    module = to_module(model, scales="recalibrate")
    x = torch.tensor([[1.0, -4.0, 40.0]])
    torch.testing.assert_close(module.train()(x), x.relu() @ torch.from_numpy(WEIGHT), atol=0.6, rtol=0.05)
    written = stored_weights(module)
    assert "zx" not in written
    assert written["sx"] == pytest.approx(named_weights(module)["sx.range"][1].item() / 255)


def test_scales_of_weights_grow_with_the_greatest_value_of_their_channel():
    model = small(PRODUCT)
    module = to_module(model, scales="recalibrate")
    with torch.no_grad():
        module.w[2, 0] = -3.0
    found = stored_weights(module)["sw"]
    torch.testing.assert_close(found, torch.tensor([0.03, 0.02]))
    assert found[1] == np.float32(0.02)


def test_the_gradient_of_a_trained_scale_is_that_of_lsq():
    """Formulas 3 and 4 of Esser et al. (2020), times the scale, because its logarithm is trained."""
    body = "xq = QuantizeLinear(x, sx, zx) xd = DequantizeLinear(xq, sx, zx) y = MatMul(xd, w)"
    module = to_module(small(body), scales="train", train=["w"])
    x = torch.tensor([[0.52, -0.87, 30.0], [-30.0, 1.234, 0.01]])
    weights = torch.tensor([[1.0, 2.0]])
    (module.train()(x) * weights).sum().backward()
    scale, low, high = np.float32(0.1), -128.0, 127.0
    v = x / float(scale)
    step = torch.where(v <= low, low, torch.where(v >= high, high, torch.round(v) - v))
    upstream = weights @ torch.from_numpy(WEIGHT).t()
    expected = (upstream * step).sum() * float(scale) / math.sqrt(3 * 255)  # 3 elements of a sample, Qmax 255
    p = dict(named_weights(module))["sx.log_factor"]
    torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)


def test_trained_scales_stay_positive():
    module = to_module(small(PRODUCT), scales="train")
    with torch.no_grad():
        for name, tensor in named_weights(module).items():
            if name.endswith(".log_factor"):
                tensor.fill_(-20.0)
    assert all(tensor.min() > 0 for name, tensor in stored_weights(module).items() if name in ("sx", "sw"))


@pytest.mark.parametrize("mode", MODES)
def test_states_of_scales_go_through_checkpoints_and_copies(mode):
    model, inputs = quantized(), feed(MODELS["tiny_conv_net"](), 5, seed=9)
    module = learn(to_module(model, scales=mode), [feed(MODELS["tiny_conv_net"](), 8, seed=0)], count=3)
    saved = {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}
    fresh = copy.deepcopy(to_module(model, scales=mode)).eval()
    assert {name: tensor.shape for name, tensor in named_weights(fresh).items()} == {
        n: t.shape for n, t in saved.items()
    }
    with torch.no_grad():
        for name, tensor in named_weights(fresh).items():
            tensor.copy_(saved[name])
    np.testing.assert_array_equal(ours(fresh, inputs).detach(), ours(module, inputs).detach())


def test_the_gate_refuses_scales_that_are_not_those_of_the_module(tmp_path):
    model = quantized()
    module = learn(to_module(model, scales="recalibrate"), [feed(MODELS["tiny_conv_net"](), 8, seed=0)], count=3)
    onnx.save(model_with_weights(module, model), tmp_path / "m.onnx")
    weights = {name: tensor.detach().clone() for name, tensor in stored_weights(module).items()}
    assert weight_problems(ModelFile.read(tmp_path / "m.onnx"), weights) == []
    weights["logits_scale"] *= 1.001
    [problem] = weight_problems(ModelFile.read(tmp_path / "m.onnx"), weights)
    assert "'logits_scale' differs from the checkpoint" in problem


# name: (nodes, what else is stored, what follows)
CASES = {
    "int8 with the zero point 0 stays symmetric": (PRODUCT, {"zx": np.int8(0)}, {"sx", "sw"}),
    "an operator on integers reads the scale": (
        "xq = QuantizeLinear(x, sx, zx) wq = QuantizeLinear<axis = 1>(w, sw, zw)"
        " z = QLinearMatMul(xq, sx, zx, wq, sw, zw, sx, zx) y = DequantizeLinear(z, sx, zx)",
        {},
        set(),
    ),
    "two values share it": (
        "xq = QuantizeLinear(x, sx, zx) xd = DequantizeLinear(xq, sx, zx) a = Mul(xd, xd)"
        " aq = QuantizeLinear(a, sx, zx) ad = DequantizeLinear(aq, sx, zx) y = MatMul(ad, w)",
        {},
        set(),
    ),
    "what is only rearranged shares it": (
        "xq = QuantizeLinear(x, sx, zx) xd = DequantizeLinear(xq, sx, zx) a = Relu(xd) aq = QuantizeLinear(a, sx, zx)"
        " ad = DequantizeLinear(aq, sx, zx) y = MatMul(ad, w)",
        {},
        {"sx"},
    ),
    "a scale is 0": (PRODUCT, {"sx": 0.0}, {"sw"}),
}


@pytest.mark.parametrize("case", CASES)
def test_only_scales_with_one_meaning_follow(case, caplog):
    body, more, follow = CASES[case]
    model = small(body, **more)
    with caplog.at_level("INFO"):
        module = to_module(model, scales="recalibrate", train=["w"])
    assert {each.scale for each in module.quantizers} == follow
    assert ("stay as they are" in caplog.text) == (len(follow) < 2 and case != "what is only rearranged shares it")
    module.train()(torch.randn(4, 3) * 50)
    assert {n for n, t in stored_weights(module).items() if n in ("zx", "zw")} <= (
        {"zx"} if "int8" not in case else set()
    )


def test_model_train_decides_about_scales_as_before():
    module = to_module(small(PRODUCT), scales="recalibrate", train=["sx"])
    assert "sx" in named_weights(module)
    assert "sx" not in {each.scale for each in module.quantizers}
