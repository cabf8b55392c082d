"""onnxruntime's operators on 8-bit integers: its results, and the gradients of dequantize - operator - quantize."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import numpy_helper, parser

from onward.trainer.onnx_import.driver import to_module

HEAD = '<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]> g (float[n, {shape}] x) => (float[{out}] r) '
STEP = 0.0211
"""The scale of results."""

CASES = {
    # name: shape of x without the batch, dimensions of the result, on integers, on floats
    "add": ("4", "n, 4", "com.microsoft.QLinearAdd(q, s, z, c, s2, z2, ys, yz)", "Add(f, fc)"),
    "mul": ("4", "n, 4", "com.microsoft.QLinearMul(q, s, z, c, s2, z2, ys, yz)", "Mul(f, fc)"),
    "sigmoid": ("4", "n, 4", "com.microsoft.QLinearSigmoid(q, s, z, ys, yz)", "Sigmoid(f)"),
    "leaky": ("4", "n, 4", "com.microsoft.QLinearLeakyRelu<alpha = 0.2>(q, s, z, ys, yz)", "LeakyRelu<alpha = 0.2>(f)"),
    "softmax": (
        *("3, 4", "n, 3, 4", "com.microsoft.QLinearSoftmax<axis = -1, opset = 13>(q, s, z, ys, yz)"),
        "Softmax<axis = -1>(f)",
    ),
    "softmax along dimension 1": (
        *("3, 4", "n, 3, 4", "com.microsoft.QLinearSoftmax<axis = 1, opset = 13>(q, s, z, ys, yz)"),
        "Softmax<axis = 1>(f)",
    ),
    "concat": (
        *("4", "n, 8", "com.microsoft.QLinearConcat<axis = 1>(ys, yz, q, s, z, q, s, z)"),
        "Concat<axis = 1>(f, f)",
    ),
    "average": (
        *("4, 6, 5", "n, 4, h, w"),
        "com.microsoft.QLinearAveragePool<kernel_shape = [3, 2], pads = [1, 0, 1, 0]>(q, s, z, ys, yz)",
        "AveragePool<kernel_shape = [3, 2], pads = [1, 0, 1, 0]>(f)",
    ),
    "global average": (
        *("4, 6, 5", "n, 4, 1, 1", "com.microsoft.QLinearGlobalAveragePool<channels_last = 0>(q, s, z, ys, yz)"),
        "GlobalAveragePool(f)",
    ),
    "where": (*("4", "n, 4", "com.microsoft.QLinearWhere(m, q, s, z, c, s2, z2, ys, yz)", "Where(m, f, fc)"),),
    "gemm": (
        "4",
        "n, 3",
        "com.microsoft.QGemm<transB = 1>(q, s, z, w, ws, wz, b, ys, yz)",
        "Gemm<transB = 1>(f, fw, fb)",
    ),
    "conv": (
        *("4, 6, 5", "n, 3, h, w", "com.microsoft.QLinearConv(q, s, z, k, ws, wz, ys, yz, b)", "Conv(f, fk, fb)"),
    ),
}
MOVED = {
    # operators that onnxruntime runs on integers directly
    "max pool": ("4, 6, 5", "n, 4, h, w", "MaxPool<kernel_shape = [2, 2]>({})"),
    "transpose": ("4, 6, 5", "n, 5, 4, 6", "Transpose<perm = [0, 3, 1, 2]>({})"),
    "reshape": ("4, 6, 5", "n, m", "Flatten({})"),
}


def constants(kind):
    rng = np.random.default_rng(0)

    def some(*shape):
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, shape, kind, endpoint=True)

    scales = {"s": 0.0503, "s2": 0.0317, "ys": STEP}
    return {
        **{name: np.float32(value) for name, value in scales.items()},
        **{name: kind(value) for name, value in (("z", 7), ("z2", 3), ("yz", 11))},
        **{"ws": np.float32([0.01, 0.02, 0.005]), "wz": np.zeros(3, np.int8)},
        **{"c": some(4), "m": np.array([True, False, True, True])},
        # of 7 bits: without VNNI, onnxruntime's kernels for x86 add two products of u8 x s8 in 16 bits, which saturate
        "w": rng.integers(-64, 63, (3, 4), np.int8, endpoint=True),
        "k": rng.integers(-64, 63, (3, 4, 2, 3), np.int8, endpoint=True),
        **{"b": np.array([300, -2000, 5], np.int32), "bs": np.float32([0.0503 * 0.01, 0.0503 * 0.02, 0.0503 * 0.005])},
    }


def model_of(shape, out, body, kind):
    text = HEAD.format(shape=shape, out=out) + "{ " + body + " }"
    model = parser.parse_model(text)
    read = {name for node in model.graph.node for name in node.input}
    stored = {name: value for name, value in constants(kind).items() if name in read}
    if "softmax" in body.lower():
        stored["ys"] = np.float32(1 / 256)  # onnxruntime rounds 1 / scale to a whole number
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in stored.items())
    return model


def on_integers(shape, out, call, kind):
    return model_of(shape, out, f"q = QuantizeLinear(x, s, z) y = {call} r = DequantizeLinear(y, ys, yz)", kind)


def on_floats(shape, out, call, kind):
    """The same between DequantizeLinear and QuantizeLinear."""
    body = f"""q = QuantizeLinear(x, s, z) f = DequantizeLinear(q, s, z) fc = DequantizeLinear(c, s2, z2)
      fw = DequantizeLinear<axis = 0>(w, ws, wz) fk = DequantizeLinear<axis = 0>(k, ws, wz)
      fb = DequantizeLinear<axis = 0>(b, bs) v = {call} y = QuantizeLinear(v, ys, yz) r = DequantizeLinear(y, ys, yz)"""
    return model_of(shape, out, body, kind)


def by_onnxruntime(model, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


def sample(model):
    dims = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim][1:]
    return (np.random.default_rng(1).standard_normal((5, *dims)) * 2.5).astype(np.float32)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_onnxruntime(case, kind):
    shape, out, call, _ = CASES[case]
    model = on_integers(shape, out, call, kind)
    x = sample(model)
    want = by_onnxruntime(model, x)
    got = to_module(model)(torch.from_numpy(x)).detach().numpy()
    assert got.shape == want.shape
    # onnxruntime looks some functions up, or multiplies by reciprocals, and may round to the other side
    steps = np.abs(got - want) / (1 / 256 if "softmax" in case else STEP)
    assert steps.max() <= 1.01
    assert (steps > 0.5).mean() <= 0.03


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_operator_between_dequantize_and_quantize(case):
    shape, out, on_int, on_float = CASES[case]
    assert_same_gradients(on_integers(shape, out, on_int, np.uint8), on_floats(shape, out, on_float, np.uint8))


@pytest.mark.parametrize("case", MOVED)
def test_gradients_pass_operators_that_move_integers(case):
    shape, out, call = MOVED[case]
    integers = model_of(
        shape, out, f"q = QuantizeLinear(x, s, z) y = {call.format('q')} r = DequantizeLinear(y, s, z)", np.uint8
    )
    floats = model_of(
        shape, out, f"q = QuantizeLinear(x, s, z) f = DequantizeLinear(q, s, z) r = {call.format('f')}", np.uint8
    )
    x = sample(integers)
    np.testing.assert_array_equal(to_module(integers)(torch.from_numpy(x)).numpy(), by_onnxruntime(integers, x))
    assert_same_gradients(integers, floats)


def assert_same_gradients(model, reference):
    """Of x and of the weights that are stored as integers: they have the same names in both."""
    gradients = []
    for each in (model, reference):
        module = to_module(each)
        x = torch.from_numpy(sample(each)).requires_grad_()
        y = module(x)
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
        assert x.grad.abs().sum() > 0
        gradients.append({"x": x.grad} | {name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    found, wanted = gradients
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


def test_channels_last_is_channels_first_transposed():
    conv = "p = Transpose<perm = [0, 2, 3, 1]>(q) t = com.microsoft.QLinearConv<channels_last = 1>(p, s, z, k, ws, wz, ys, yz, b) Transpose<perm = [0, 3, 1, 2]>(t)"  # noqa: E501
    pool = "p = Transpose<perm = [0, 2, 3, 1]>(q) t = com.microsoft.QLinearAveragePool<kernel_shape = [2, 2], channels_last = 1>(p, s, z, ys, yz) Transpose<perm = [0, 3, 1, 2]>(t)"  # noqa: E501
    first = (
        "com.microsoft.QLinearConv(q, s, z, k, ws, wz, ys, yz, b)",
        "com.microsoft.QLinearAveragePool<kernel_shape = [2, 2]>(q, s, z, ys, yz)",
    )
    for last, other in zip((conv, pool), first, strict=True):
        *steps, end = last.rsplit(") ", 1)
        body = f"q = QuantizeLinear(x, s, z) {steps[0]}) y = {end} r = DequantizeLinear(y, ys, yz)"
        assert_same_gradients(
            model_of("4, 6, 5", "n, c, h, w", body, np.uint8), on_integers("4, 6, 5", "n, c, h, w", other, np.uint8)
        )


@pytest.mark.parametrize("operator", ["MatMulIntegerToFloat", "DynamicQuantizeMatMul"])
def test_products_of_dynamic_quantization_are_those_of_onnxruntime(operator):
    if operator == "DynamicQuantizeMatMul":
        body = "r = com.microsoft.DynamicQuantizeMatMul(x, wt, ws1, wz1, fb)"
    else:
        body = """q, qs, qz = DynamicQuantizeLinear(x)
          r = com.microsoft.MatMulIntegerToFloat(q, wt, qs, ws1, qz, wz1, fb)"""
    model = parser.parse_model(HEAD.format(shape="4", out="n, 3") + "{ " + body + " }")
    stored = {
        "wt": np.random.default_rng(0).integers(-64, 63, (4, 3), np.int8),
        **{"ws1": np.float32([0.01]), "wz1": np.int8([3]), "fb": np.float32([1, -2, 3])},
    }
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in stored.items())
    x = sample(model)
    module = to_module(model)
    np.testing.assert_allclose(module(torch.from_numpy(x)).detach(), by_onnxruntime(model, x), rtol=1e-4, atol=1e-4)
    assert {name for name, _ in module.named_parameters()} == {"wt", "fb"}
    module(torch.from_numpy(x)).sum().backward()
    assert module.wt.grad.abs().sum() > 0


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("options", ["", "mask", "past", "unidirectional"])
def test_attention_with_integers_is_that_of_onnxruntime_and_of_the_dequantized_one(options, per_channel):
    width = 16
    rng = np.random.default_rng(0)
    names = {"mask": ", int32[n] mask", "past": ", float[2, n, 4, p, 4] past"}.get(options, "")
    head = HEAD.format(shape="s, 8", out="n, s, 16").replace(" x)", f" x{names})")
    unidirectional, results = int(options == "unidirectional"), "r, present" if options == "past" else "r"
    mask, past = ("mask" if options == "mask" else '""'), ("past" if options == "past" else '""')
    calls = (
        f"{results} = com.microsoft.QAttention<num_heads = 4, unidirectional = {unidirectional}>"
        f"(q, wt, fb, qs, ws1, {mask}, qz, wz1, {past})",
        f"""f = DequantizeLinear(q, qs, qz) w = DequantizeLinear(wt, ws1, wz1)
        {results} = com.microsoft.Attention<num_heads = 4, unidirectional = {unidirectional}>
          (f, w, fb, {mask}, {past})""",
    )
    scales = (3 * width,) if per_channel else ()
    stored = {
        "wt": rng.integers(-64, 63, (8, 3 * width), np.int8),
        "ws1": (rng.random(scales) * 0.02 + 0.01).astype(np.float32) if per_channel else np.float32(0.013),
        **{"wz1": np.zeros(scales, np.int8), "fb": rng.standard_normal(3 * width).astype(np.float32)},
    }
    given = {"x": rng.standard_normal((3, 5, 8)).astype(np.float32)}
    given |= {"mask": {"mask": np.array([5, 3, 4], np.int32)}}.get(options, {})
    given |= {"past": {"past": rng.standard_normal((2, 3, 4, 2, 4)).astype(np.float32)}}.get(options, {})
    gradients = []
    for call in calls:
        model = parser.parse_model(head + "{ q, qs, qz = DynamicQuantizeLinear(x) " + call + " }")
        for name, value in stored.items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        module = to_module(model)
        tensors = [torch.from_numpy(each) for each in given.values()]
        x = tensors[0].requires_grad_()
        y = module(*tensors)
        if call is calls[0]:
            session = onnxruntime.InferenceSession(model.SerializeToString())
            np.testing.assert_allclose(y.detach(), session.run(None, given)[0], rtol=1e-4, atol=1e-5)
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
        gradients.append({"x": x.grad} | {name: p.grad for name, p in module.named_parameters()})
    found, wanted = gradients
    assert found.keys() == wanted.keys() == {"x", "wt", "fb"}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)
