"""Quantized operators and casts to few bits: what onnxruntime computes, and gradients as if nothing were rounded."""

import itertools

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights

UNSIGNED = {TensorProto.UINT8: np.uint8, TensorProto.UINT16: np.uint16}
SIGNED = {TensorProto.INT8: np.int8, TensorProto.INT16: np.int16}
INTEGERS = UNSIGNED | SIGNED


def by_onnxruntime(model, *inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # otherwise it fuses what is quantized and back, and rounds elsewhere
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))


def assert_same(model, *inputs, atol=1e-6):
    """The module on these inputs, and onnxruntime."""
    got = to_module(model)(*map(torch.from_numpy, inputs))
    got = got if isinstance(got, tuple) else (got,)
    for one, other in zip(got, by_onnxruntime(model, *inputs), strict=True):
        assert one.detach().numpy().dtype == other.dtype
        np.testing.assert_allclose(one.detach().numpy(), other, atol=atol, rtol=1e-6)


def random(*shape, scale=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def integers(kind, *shape, seed=0):
    info = np.iinfo(kind)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, kind, endpoint=True)


def multiplied(kind, *shape, seed=0):
    """Stored integers that onnxruntime multiplies exactly on every processor: of 7 bits where they are signed.

    Without VNNI its kernels for x86 add two products of u8 x s8 in 16 bits, which saturate beyond 255 x 64 x 2.
    """
    values = integers(kind, *shape, seed=seed)
    return values // 2 if kind is np.int8 else values


GRAINS = {"tensor": ((), {}), "axis": ((6,), {"axis": 1}), "blocks": ((4, 2, 5), {"axis": 1, "block_size": 3})}
"""Of x [4, 6, 5]: the shape of the scales, and the attributes that say what they are of."""


@pytest.mark.parametrize("kind", [*INTEGERS, TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize("grain", GRAINS)
def test_quantizing_and_back_is_what_onnxruntime_computes(grain, kind):
    shape, attributes = GRAINS[grain]
    g = GraphWriter("quantize", opset=21)
    x = g.input("x", ("batch", 6, 5) if grain != "blocks" else (4, 6, 5))
    scale = g.weight("scale", (np.abs(random(*shape)) * 0.1 + 0.01).astype(np.float32))
    y = g.op("QuantizeLinear", x, scale, *zero_points(g, kind, shape), output_dtype=kind, **attributes)
    g.op("DequantizeLinear", y, scale, *zero_points(g, kind, shape), outputs="back", **attributes)
    g.output("back", ("batch", 6, 5))
    if kind in INTEGERS:
        g.output(y, ("batch", 6, 5), kind)
    assert_same(g.model(), random(4, 6, 5, scale=100.0 if kind in INTEGERS else 0.2))


def zero_points(g, kind, shape):
    if kind not in INTEGERS:
        return ()  # 4 bits: usually without
    low = INTEGERS[kind](100) if kind in UNSIGNED else INTEGERS[kind](-3)
    return (g.weight("zero", np.full(shape, low)),)


FLOAT8 = {
    "FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn,
    "FLOAT8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "FLOAT8E5M2": ml_dtypes.float8_e5m2,
    "FLOAT8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}


def through_float8(operator, kind, saturate):
    """x, quantized with the scale 1 or cast, and back."""
    g = GraphWriter("float8", opset=21)
    x, scale, target = g.input("x", ("n",)), g.weight("scale", 1.0), TensorProto.DataType.Value(kind)
    if operator == "Cast":
        g.op("Cast", g.op("Cast", x, to=target, saturate=saturate), to=TensorProto.FLOAT, outputs="y")
    else:
        small = g.op("QuantizeLinear", x, scale, output_dtype=target, saturate=saturate)
        g.op("DequantizeLinear", small, scale, outputs="y")
    g.output("y", ("n",))
    return g.model()


EDGES = np.float32([0, -0.0, 448, 464, 464.1, 480, 240, 247.9, 248, 57344, 61439, 61440, 1e30, np.inf, np.nan])
WIDE = np.concatenate([random(500, scale=300.0), EDGES, -EDGES, EDGES * np.float32(1e-6)])


@pytest.mark.parametrize("operator", ["Cast", "QuantizeLinear"])
@pytest.mark.parametrize("kind", FLOAT8)
def test_8_bit_floats_saturate_as_in_onnxruntime(operator, kind):
    assert_same(through_float8(operator, kind, saturate=1), WIDE)


@pytest.mark.parametrize("operator", ["Cast", "QuantizeLinear"])
@pytest.mark.parametrize("kind", FLOAT8)
def test_8_bit_floats_that_do_not_saturate_are_those_of_the_standard(operator, kind):
    """Which ml_dtypes implements; onnxruntime 1.31 makes 448 of 480, and NaN of what is infinite in E5M2."""
    module = to_module(through_float8(operator, kind, saturate=0))
    with np.errstate(all="ignore"):
        wanted = WIDE.astype(FLOAT8[kind]).astype(np.float32)
    np.testing.assert_array_equal(module(torch.from_numpy(WIDE)).numpy(), wanted)


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23])
def test_every_version_of_quantization_means_the_same(opset):
    g = GraphWriter("versions", opset=opset)
    x, scale, zero = g.input("x", ("n", 3)), g.weight("scale", 0.1), g.weight("zero", np.uint8(7))
    g.op("DequantizeLinear", g.op("QuantizeLinear", x, scale, zero), scale, zero, outputs="y")
    g.output("y", ("n", 3))
    assert_same(g.model(), random(4, 3, scale=20.0))


@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_dynamic_quantization_is_what_onnxruntime_computes(shift):
    g = GraphWriter("dynamic", opset=20)
    g.op("DynamicQuantizeLinear", g.input("x", ("n", 3)), outputs=["y", "scale", "zero"])
    g.output("y", ("n", 3), TensorProto.UINT8)
    g.output("scale", ())
    g.output("zero", (), TensorProto.UINT8)
    assert_same(g.model(), random(50, 3, scale=1.0) + np.float32(shift))


@pytest.mark.parametrize("width", [5, 600], ids=["in fp32", "in fp64"])
@pytest.mark.parametrize("right", [np.uint8, np.int8])
@pytest.mark.parametrize("per_column", [False, True])
def test_integer_products_are_exact(width, right, per_column):
    g = GraphWriter("product", opset=20)
    zero = integers(right, 4, seed=1) if per_column else right(3)
    b = g.weight("b", multiplied(right, width, 4))
    g.op("MatMulInteger", g.input("a", ("n", width), TensorProto.UINT8), b, g.weight("a_zero", np.uint8(9)),
         g.weight("b_zero", zero), outputs="y")  # fmt: skip
    g.output("y", ("n", 4), TensorProto.INT32)
    assert_same(g.model(), integers(np.uint8, 7, width, seed=2), atol=0)


@pytest.mark.parametrize(("right", "per_channel"), list(itertools.product([np.uint8, np.int8], [False, True])))
@pytest.mark.parametrize(
    "attributes",
    [{}, {"pads": [1, 0, 2, 1], "strides": [2, 1]}, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, {"group": 2}],
    ids=lambda attributes: ",".join(attributes) or "plain",
)
def test_quantized_convolution_is_what_onnxruntime_computes(right, per_channel, attributes):
    g = GraphWriter("convolution", opset=20)
    w = g.weight("w", multiplied(right, 4, 4 // attributes.get("group", 1), 3, 2))
    scales = np.abs(random(4, scale=0.01)) + np.float32(0.001) if per_channel else np.float32(0.004)
    zeros = np.zeros(4, right) if per_channel else right(0)  # as quantizers make them
    g.op(
        "QLinearConv",
        *(g.input("x", ("n", 4, 8, 7), TensorProto.UINT8), g.weight("xs", 0.02), g.weight("xz", np.uint8(120))),
        *(w, g.weight("ws", scales), g.weight("wz", zeros), g.weight("ys", 0.9), g.weight("yz", np.uint8(99))),
        g.weight("b", np.array([3, -1000, 20000, 0], np.int32)),
        outputs="y",
        **attributes,
    )
    g.output("y", ("n", 4, "h", "w"), TensorProto.UINT8)
    assert_same(g.model(), integers(np.uint8, 2, 4, 8, 7, seed=3), atol=0)


def test_an_integer_convolution_pads_with_the_zero_point():
    g = GraphWriter("convolution", opset=20)
    w = g.weight("w", integers(np.uint8, 4, 3, 3, 3))
    x, zero = g.input("x", ("n", 3, 6, 6), TensorProto.UINT8), g.weight("xz", np.uint8(7))
    g.op("ConvInteger", x, w, zero, g.weight("wz", np.uint8(99)), pads=[1, 1, 1, 1], outputs="y")
    g.output("y", ("n", 4, 6, 6), TensorProto.INT32)
    assert_same(g.model(), integers(np.uint8, 2, 3, 6, 6, seed=4), atol=0)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_a_quantized_product_is_what_onnxruntime_computes(kind):
    g = GraphWriter("product", opset=20)
    element = TensorProto.UINT8 if kind is np.uint8 else TensorProto.INT8
    g.op(
        "QLinearMatMul",
        *(g.input("a", ("n", 9), element), g.weight("as", 0.02), g.weight("az", kind(3))),
        *(g.weight("b", integers(kind, 9, 4)), g.weight("bs", 0.01), g.weight("bz", kind(11))),
        *(g.weight("ys", 0.1), g.weight("yz", kind(50))),
        outputs="y",
    )
    g.output("y", ("n", 4), element)
    assert_same(g.model(), integers(kind, 20, 9, seed=5), atol=0)


# -- gradients


def fine_tuned():
    """x quantized and back, times a float weight quantized and back, plus a bias."""
    g = GraphWriter("fine_tuned", seed=3, opset=21)

    def rounded(name, value, scale):
        parameters = g.weight(f"{name}.scale", scale), g.weight(f"{name}.zero", np.int8(0))
        return g.op("DequantizeLinear", g.op("QuantizeLinear", value, *parameters), *parameters)

    x = rounded("x", g.input("x", ("n", 3)), 0.05)
    w = rounded("w", g.weight("weight", g.normal(0.5, 3, 4)), 0.02)
    g.op("Add", g.op("MatMul", x, w), g.weight("bias", g.normal(1.0, 4)), outputs="y")
    g.output("y", ("n", 4))
    return g.model()


def test_gradients_pass_quantization_except_where_it_clamps():
    module = to_module(fine_tuned())
    assert set(named_weights(module)) == {"weight", "bias"}
    with torch.no_grad():
        module.weight[1, 2] = 100.0  # far beyond 127 x 0.02
    x = torch.tensor([[0.5, -0.3, 40.0], [1.0, 0.2, 0.1]], requires_grad=True)
    module(x).sum().backward()
    w = torch.fake_quantize_per_tensor_affine(module.weight, 0.02, 0, -128, 127)
    inside = torch.tensor([[True, True, False], [True, True, True]])
    torch.testing.assert_close(x.grad, torch.where(inside, w.sum(1), 0.0))
    rounded = torch.fake_quantize_per_tensor_affine(x.detach(), 0.05, 0, -128, 127)
    wanted = rounded.sum(0)[:, None].expand(3, 4).clone()
    wanted[1, 2] = 0
    torch.testing.assert_close(module.weight.grad, wanted)
    torch.testing.assert_close(module.bias.grad, torch.full((4,), 2.0))


def test_a_model_quantized_for_inference_passes_gradients_to_earlier_layers():
    g = GraphWriter("dynamic", seed=1, opset=20)
    hidden = g.op("MatMul", g.input("x", ("n", 3)), g.weight("first", g.normal(0.5, 3, 5)))
    g.op("DynamicQuantizeLinear", hidden, outputs=["q", "scale", "zero"])
    product = g.op("MatMulInteger", "q", g.weight("second", multiplied(np.int8, 5, 2)), "zero")
    product = g.op("Mul", g.op("Cast", product, to=TensorProto.FLOAT), g.op("Mul", "scale", g.weight("s", 0.01)))
    g.op("Add", product, g.weight("bias", g.normal(1.0, 2)), outputs="y")
    g.output("y", ("n", 2))
    model = g.model()
    assert_same(model, random(4, 3), atol=1e-5)
    module = to_module(model)
    x = torch.from_numpy(random(4, 3))
    module(x).sum().backward()
    assert set(named_weights(module)) == {"first", "bias"}
    second = torch.from_numpy(multiplied(np.int8, 5, 2)).float() * 0.01
    torch.testing.assert_close(module.first.grad, x.sum(0)[:, None] * second.sum(1), rtol=1e-4, atol=1e-4)


# -- casts


@pytest.mark.parametrize(
    ("round_mode", "wanted"), [("up", [2, 4, 4, 8]), ("down", [2, 2, 2, 4]), ("nearest", [2, 2, 4, 4])]
)
def test_casts_to_powers_of_two_follow_the_round_mode(round_mode, wanted):
    g = GraphWriter("cast", opset=24)
    small = g.op("Cast", g.input("x", ("n",)), to=TensorProto.FLOAT8E8M0, round_mode=round_mode)
    g.op("Cast", small, to=TensorProto.FLOAT, outputs="y")
    g.output("y", ("n",))
    y = to_module(g.model())(torch.tensor([2.0, 2.9, 3.0, 5.0]))
    assert y.tolist() == wanted


def test_bit_cast_keeps_the_bits():
    g = GraphWriter("bits", opset=26)
    g.op("BitCast", g.input("x", ("n",)), to=TensorProto.UINT32, outputs="y")
    g.output("y", ("n",), TensorProto.UINT32)
    x = random(20)
    assert (to_module(g.model())(torch.from_numpy(x)).numpy() == x.view(np.uint32)).all()
