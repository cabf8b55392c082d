"""Gradients of every differentiable operator against finite differences, in float64; the others are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.lowering.converter_table import RULES

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Fixed:
    """A float operand that is part of the file and not differentiated."""

    array: Array


@dataclass(frozen=True)
class Case:
    """One node: float64 arrays are its differentiated inputs, others constants of the file, None is left out."""

    operands: tuple[Array | Fixed | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    opset: int = 21
    training: bool = False

    def model(self, operator: str) -> onnx.ModelProto:
        names = ["" if operand is None else f"x{i}" for i, operand in enumerate(self.operands)]
        inputs, stored = [], []
        for name, operand in zip(names, self.operands, strict=True):
            if is_differentiated(operand):
                inputs.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, operand.shape))
            elif operand is not None:
                array = operand.array if isinstance(operand, Fixed) else operand
                stored.append(numpy_helper.from_array(np.asarray(array), name))
        results = [f"y{i}" for i in range(self.outputs)]
        domain, _, name = operator.rpartition(".")
        node = helper.make_node(name, names, results, domain=domain, **self.attributes)
        ends = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in results]
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(helper.make_graph([node], operator, inputs, ends, stored), opset_imports=imports)

    def differentiated(self) -> list[torch.Tensor]:
        return [torch.from_numpy(array).requires_grad_() for array in self.operands if is_differentiated(array)]


def is_differentiated(operand: object) -> bool:
    return isinstance(operand, np.ndarray) and operand.dtype == np.float64


def some(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> Array:
    """Distinct values in random order, none of them at a kink: 0, a half or a whole number."""
    count = int(np.prod(shape))
    steps = low + (high - low) * (np.arange(count) + 0.4137) / count
    return np.random.default_rng(seed).permutation(steps).reshape(shape)


def ints(*values: Any) -> Array:
    return np.array(values, np.int64)


def case(*operands: Array | Fixed | None, outputs: int = 1, opset: int = 21, **attributes: Any) -> Case:
    return Case(operands, attributes, outputs, opset)


UNARY: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        ["Abs", "Asinh", "Atan", "Cos", "Cosh", "Erf", "Exp", "Neg", "Sin", "Sinh", "Tanh", "Identity"], (-2.0, 2.0)
    ),
    **dict.fromkeys(["Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu"], (-3.9, 3.9)),
    **dict.fromkeys(["Selu", "Shrink", "Sigmoid", "Softplus", "Softsign", "Swish", "ThresholdedRelu"], (-2.9, 2.9)),
    **dict.fromkeys(["Acos", "Asin", "Atanh", "Tan"], (-0.9, 0.9)),
    **dict.fromkeys(["Log", "Sqrt", "Reciprocal"], (0.2, 2.0)),
    "Acosh": (1.2, 3.0),
}
ATTRIBUTES: dict[str, dict[str, Any]] = {"Shrink": {"lambd": 0.7, "bias": 0.2}, "Gelu": {"approximate": "tanh"}}
NEWEST = {"Swish": 24}
IMAGE, PAIRS = some(1, 2, 5, 4), some(2, 3, 4)

CASES: dict[str, list[Case]] = {
    **{
        name: [case(some(3, 4, low=low, high=high), opset=NEWEST.get(name, 21), **ATTRIBUTES.get(name, {}))]
        for name, (low, high) in UNARY.items()
    },
    # -- arithmetic: broadcasting sums the gradient
    **{name: [case(some(2, 3), some(3, low=0.5, seed=1))] for name in ("Add", "Sub", "Mul", "Div", "PRelu")},
    **{name: [case(some(2, 3), some(3, seed=1), some(2, 1, seed=2))] for name in ("Max", "Min", "Mean", "Sum")},
    "Pow": [case(some(2, 3, low=0.3), some(3, seed=1)), case(some(2, 3), Fixed(np.array(2.0)))],
    "Mod": [case(some(2, 3), Fixed(np.array([0.7, 0.9, 1.1])), fmod=1)],
    "Clip": [case(some(3, 4), Fixed(np.array(-1.01)), Fixed(np.array(0.77)))],
    "Where": [case(np.array([[True], [False]]), some(2, 3), some(3, seed=1))],
    "CumSum": [case(some(2, 4), ints(1)[0], reverse=1, exclusive=1)],
    "CumProd": [case(some(2, 4), ints(1)[0], opset=26)],
    "Cast": [case(some(2, 3), to=TensorProto.DOUBLE)],
    "CastLike": [case(some(2, 3), Fixed(np.array(1.0)))],
    # -- layers
    "MatMul": [
        case(some(2, 3), some(3, 2, seed=1)),
        case(some(2, 1, 2, 3), some(2, 3, 2, seed=1)),
        case(some(3), some(3)),
    ],
    "Gemm": [case(some(3, 2), some(4, 3, seed=1), some(4, seed=2), alpha=0.5, beta=2.0, transA=1, transB=1)],
    "Einsum": [case(some(2, 3), some(2, 3, 2, seed=1), equation="bi,bij->bj")],
    "Det": [case(some(2, 3, 3))],
    "Conv": [
        case(some(1, 4, 5), some(4, 2, 3, seed=1), some(4, seed=2), group=2, strides=[2], pads=[1, 0]),
        case(IMAGE, some(2, 2, 2, 2, seed=1), dilations=[2, 1]),
    ],
    "ConvTranspose": [
        case(some(1, 2, 3), some(2, 2, 3, seed=1), some(2, seed=2), strides=[2], pads=[1, 0], output_padding=[1]),
    ],
    "DeformConv": [
        case(some(1, 2, 3, 3), some(1, 2, 2, 2, seed=1), some(1, 8, 2, 2, low=-0.4, high=0.4, seed=2), opset=19)
    ],
    "CausalConvWithState": [
        case(some(1, 2, 4), some(2, 1, 3, seed=1), some(2, seed=2), some(1, 2, 2, seed=3), outputs=2, opset=27)
    ],
    "MaxPool": [case(IMAGE, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 0])],
    "MaxUnpool": [case(some(1, 1, 2, 2), ints(0, 3, 9, 14).reshape(1, 1, 2, 2), kernel_shape=[2, 2], strides=[2, 2])],
    "AveragePool": [case(IMAGE, kernel_shape=[3, 2], pads=[1, 0, 1, 0], count_include_pad=1)],
    "LpPool": [case(IMAGE, kernel_shape=[2, 2], p=2)],
    "GlobalAveragePool": [case(IMAGE)],
    "GlobalMaxPool": [case(IMAGE)],
    "GlobalLpPool": [case(IMAGE)],
    "RoiAlign": [
        case(IMAGE, Fixed(np.array([[0.3, 0.2, 3.1, 3.3]])), ints(0), output_height=2, output_width=2, sampling_ratio=2)
    ],
    "Col2Im": [case(some(1, 4, 6), ints(3, 4), ints(2, 2))],
    "LRN": [case(some(1, 4, 2, 2), size=3, alpha=0.1)],
    # -- normalisations and what follows them
    "BatchNormalization": [
        Case(
            (some(3, 2, 2), some(2, seed=1), some(2, seed=2), Fixed(some(2)), Fixed(some(2, low=0.5))),
            training=training,
            opset=15,
        )
        for training in (False, True)
    ],
    "LayerNormalization": [
        case(PAIRS, some(4, seed=1), some(4, seed=2), axis=-1),
        case(PAIRS, some(3, 4, seed=1), axis=1),
    ],
    "RMSNormalization": [case(PAIRS, some(4, seed=1), opset=23)],
    "InstanceNormalization": [case(some(2, 2, 4), some(2, seed=1), some(2, seed=2))],
    "GroupNormalization": [case(some(2, 4, 3), some(4, seed=1), some(4, seed=2), num_groups=2)],
    "LpNormalization": [case(some(3, 4), axis=1, p=1), case(some(3, 4), axis=0, p=2)],
    "MeanVarianceNormalization": [case(some(2, 2, 2, 3))],
    "Dropout": [case(some(3, 4))],
    "Softmax": [case(some(3, 4), axis=0), case(PAIRS, opset=11, axis=1)],
    "LogSoftmax": [case(some(3, 4))],
    # -- attention and recurrence
    "Attention": [case(some(1, 2, 3, 4), some(1, 2, 3, 4, seed=1), some(1, 2, 3, 4, seed=2), is_causal=1, opset=23)],
    "LinearAttention": [
        case(
            *(some(1, 3, 4, seed=seed) for seed in range(3)),
            some(1, 2, 2, 2, seed=3),
            some(1, 3, 2, low=-1.0, high=-0.1, seed=4),
            some(1, 3, 2, low=0.1, high=0.9, seed=5),
            q_num_heads=2,
            kv_num_heads=2,
            update_rule=rule,
            outputs=2,
            opset=27,
        )
        for rule in ("gated", "gated_delta")
    ],
    "RotaryEmbedding": [case(some(1, 2, 3, 4), some(1, 3, 2, seed=1), some(1, 3, 2, seed=2), opset=23)],
    **{
        name: [
            case(
                some(3, 2, 2),
                some(2, 2 * gates, 2, low=-0.9, high=0.9, seed=1),
                some(2, 2 * gates, 2, low=-0.8, high=0.8, seed=2),
                some(2, 4 * gates, seed=3),
                None,
                some(2, 2, 2, seed=4),
                outputs=2,
                hidden_size=2,
                direction="bidirectional",
            )
        ]
        for name, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
    },
    # -- sums and extremes along axes
    **{
        f"Reduce{name}": [case(some(2, 3, 2, low=0.2), ints(1), keepdims=0)]
        for name in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    },
    "TopK": [case(some(2, 5), ints(3), axis=1)],
    # -- moving values about
    "Concat": [case(some(2, 3), some(2, 1, seed=1), axis=1)],
    "Split": [case(some(2, 5), ints(2, 3), outputs=2, axis=1)],
    "Slice": [case(some(4, 5), ints(3, 0), ints(-9, 5), ints(0, 1), ints(-2, 2))],
    "Pad": [
        case(some(2, 3), ints(0, 1, 1, -1), Fixed(np.array(0.5))),
        case(some(3, 3), ints(1, 1, 1, 1), mode="reflect"),
    ],
    "CenterCropPad": [case(some(3, 4), ints(2, 5), axes=[0, 1])],
    "Expand": [case(some(2, 1), ints(3, 2, 2))],
    "Tile": [case(some(2, 2), ints(2, 3))],
    "Reshape": [case(some(2, 6), ints(0, 3, -1))],
    "Flatten": [case(PAIRS, axis=2)],
    "Squeeze": [case(some(2, 1, 3), ints(1))],
    "Unsqueeze": [case(some(2, 3), ints(0, 3))],
    "Transpose": [case(PAIRS, perm=[2, 0, 1])],
    "Trilu": [case(some(3, 4), ints(1)[0], upper=0)],
    "DepthToSpace": [case(some(1, 4, 2, 2), blocksize=2, mode="CRD")],
    "SpaceToDepth": [case(some(1, 1, 4, 4), blocksize=2)],
    "ReverseSequence": [case(some(4, 2), ints(3, 2))],
    "Gather": [case(some(4, 2), ints([0, 3], [3, -2]))],
    "GatherElements": [case(some(3, 2), ints([0, 2], [2, 1]))],
    "GatherND": [case(some(2, 3, 2), ints([1, 2], [0, -1]))],
    "ScatterElements": [
        case(some(3, 2), ints([0, 2], [2, 1]), some(2, 2, seed=1), reduction=how)
        for how in ("none", "add", "mul", "max")
    ],
    "ScatterND": [
        case(some(4, 2), ints([3], [0]), some(2, 2, seed=1), reduction=how) for how in ("none", "add", "min")
    ],
    "Scatter": [case(some(3, 2), ints([0, 1]), some(1, 2, seed=1), opset=9)],
    "TensorScatter": [case(some(1, 4, 2), some(1, 2, 2, seed=1), ints(1), axis=1, opset=24)],
    "Compress": [case(some(4, 2), np.array([True, False, True, True]), axis=0)],
    "OneHot": [case(ints(0, 2), ints(3)[0], some(2))],
    # -- images and signals
    "Resize": [
        case(IMAGE, None, Fixed(np.array([1, 1, 1.6, 0.5], np.float32)), mode="linear"),
        case(IMAGE, None, None, ints(1, 2, 7, 8), mode="cubic", coordinate_transformation_mode="align_corners"),
        case(IMAGE, None, None, ints(1, 2, 7, 8), mode="nearest"),
    ],
    "Upsample": [case(IMAGE, Fixed(np.array([1, 1, 2, 2], np.float32)), opset=9, mode="linear")],
    "GridSample": [case(some(1, 2, 3, 3), some(1, 2, 2, 2, low=-0.8, high=0.8, seed=1), align_corners=1, opset=20)],
    "AffineGrid": [case(some(1, 2, 3), ints(1, 1, 2, 3), opset=20)],
    "DFT": [
        case(some(1, 5, 1), None, ints(1)[0], opset=20),
        case(some(1, 4, 2), None, ints(1)[0], inverse=1, opset=20),
    ],
    "STFT": [case(some(1, 8, 1), ints(2)[0], Fixed(some(4)), ints(4)[0])],
    # -- losses
    "SoftmaxCrossEntropyLoss": [
        case(some(3, 4), ints(1, 3, 0), Fixed(some(4, low=0.5)), reduction="mean", ignore_index=0),
        case(some(2, 3, 2), ints([0, 2], [1, 1]), reduction="none"),
    ],
    "NegativeLogLikelihoodLoss": [case(some(3, 4), ints(1, 3, 0), reduction="sum")],
}

STATES = tuple(some(1, 3, 4, seed=seed) for seed in range(3))
"""Queries, keys and values: [batch, sequence, width]."""

SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0}


def levels(*shape: int) -> Array:
    """Any integers of a byte."""
    return np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)


FUSED: dict[str, list[Case]] = {
    "Gelu": [case(some(2, 4))],
    "FastGelu": [case(some(2, 4), some(4, seed=1))],
    "QuickGelu": [case(some(2, 4))],
    "BiasGelu": [case(some(2, 4), some(4, seed=1))],
    "BiasSplitGelu": [case(some(1, 2, 4), some(4, seed=1))],
    "BiasAdd": [case(some(1, 2, 4), some(4, seed=1), some(1, 2, 4, seed=2))],
    "Trilu": [case(some(3, 4))],
    "FusedMatMul": [case(some(3, 2), some(3, 4, seed=1), alpha=0.5, transA=1)],
    "TransposeMatMul": [case(some(2, 3), some(4, 3, seed=1), transB=1)],
    "FusedGemm": [case(some(2, 3), some(3, 4, seed=1), some(4, seed=2), activation="LeakyRelu", activation_alpha=0.3)],
    "FusedConv": [case(IMAGE, some(2, 2, 2, 2, seed=1), some(2, seed=2), activation="Tanh")],
    "SkipLayerNormalization": [case(STATES[0], STATES[1], some(4, seed=3), some(4, seed=4), some(4, seed=5))],
    "SkipSimplifiedLayerNormalization": [case(STATES[0], STATES[1], some(4, seed=3), some(4, seed=4))],
    "EmbedLayerNormalization": [
        case(
            *(ints([0, 2]).astype(np.int32), ints([1, 0]).astype(np.int32)),
            *(some(3, 4), some(2, 4, seed=1), some(2, 4, seed=2), some(4, seed=3), some(4, seed=4)),
        )
    ],
    "Attention": [case(STATES[0], some(4, 12, seed=3), some(12, seed=4), num_heads=2, unidirectional=1)],
    "MultiHeadAttention": [case(*STATES, some(12, seed=3), num_heads=2)],
    "GroupQueryAttention": [
        case(
            *(STATES[0], some(1, 3, 2, seed=1), some(1, 3, 2, seed=2), None, None),
            *(np.array([2], np.int32), np.array(3, np.int32)),
            num_heads=2,
            kv_num_heads=1,
        )
    ],
    "RotaryEmbedding": [case(some(1, 3, 4), ints([0, 1, 2]), some(4, 1, seed=1), some(4, 1, seed=2), num_heads=2)],
    # -- weights that are integers: the gradients of all other operands
    "MatMulNBits": [
        case(some(2, 20), levels(3, 2, 8), some(3, 2, seed=1), None, None, some(3, seed=2), N=3, K=20, block_size=16),
        case(some(2, 20), levels(3, 2, 8), Fixed(some(3, 2)), levels(3, 1), None, some(3), N=3, K=20, block_size=16),
    ],
    "MoE": [case(PAIRS, some(6, 3), some(3, 10, 4, seed=1), some(3, 10), some(3, 4, 5), some(3, 4), k=2, **SWIGLU)],
    "QMoE": [
        case(
            *(PAIRS, some(6, 3), levels(3, 6, 4), Fixed(some(3, 6)), some(3, 6), levels(3, 4, 6), Fixed(some(3, 4))),
            some(3, 4),
            **{"k": 2, "expert_weight_bits": 8, "activation_type": "silu"},
        )
    ],
    "DynamicQuantizeLSTM": [
        case(
            *(some(2, 3, 4), levels(1, 4, 8), levels(1, 2, 8), some(1, 16), None, some(1, 3, 2, seed=1)),
            *(some(1, 3, 2, seed=2), some(1, 6), Fixed(some(1, 8) / 99), levels(1, 8), Fixed(some(1) / 99), levels(1)),
            hidden_size=2,
        )
    ],
}
"""Operators of com.microsoft, which onnxruntime's own optimiser writes."""
CASES |= {f"com.microsoft.{name}": cases for name, cases in FUSED.items()}
CASES["SimplifiedLayerNormalization"] = [case(PAIRS, some(4, seed=1))]

QLINEAR = (
    *(f"QLinear{name}" for name in ("Add", "Mul", "Sigmoid", "LeakyRelu", "Softmax", "Concat", "Where", "Conv")),
    *("QLinearAveragePool", "QLinearGlobalAveragePool", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
    "QAttention",
)
INTEGERS, PLACES, CONSTANT = "integers or booleans come out", "a count or a place comes out", "no float goes in"
STEPS, WHOLE = "constant between its steps", "tested with the operators that read its sequence"
NOT_DIFFERENTIABLE: dict[str, str] = {
    **dict.fromkeys(["And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"], INTEGERS),
    **dict.fromkeys(["BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "BitCast"], INTEGERS),
    **dict.fromkeys(["IsInf", "IsNaN", "OptionalHasElement", "StringNormalizer"], INTEGERS),
    **dict.fromkeys(["ArgMax", "ArgMin", "NonZero", "NonMaxSuppression", "Unique", "Shape", "Size"], PLACES),
    **dict.fromkeys(["SequenceLength"], PLACES),
    **dict.fromkeys(["Ceil", "Floor", "Round", "Sign", "Hardmax"], STEPS),
    **dict.fromkeys(["Constant", "ConstantOfShape", "EyeLike", "Range", "SequenceEmpty"], CONSTANT),
    **dict.fromkeys(["BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"], CONSTANT),
    **dict.fromkeys(["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"], CONSTANT),
    **dict.fromkeys(["Bernoulli", "Multinomial"], STEPS),
    "onward.StochasticDepth": "the import's own, in no file; its gradient: test_stochastic_depth.py",
    **dict.fromkeys(["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"], STEPS),
    **dict.fromkeys(["com.microsoft.QuantizeLinear", "com.microsoft.DequantizeLinear"], STEPS),
    **{f"com.microsoft.{name}": "compared with the same operator on floats: test_qlinear.py" for name in QLINEAR},
    "com.microsoft.GatherBlockQuantized": CONSTANT,
    **dict.fromkeys(["QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger"], INTEGERS),
}
"""Operator -> why it has no gradient to check."""

OPENING = '<ir_version: 8, opset_import: ["": 18]> g (double[3, 2] x, double[2] z) => '
SEVERAL: dict[tuple[str, ...], str] = {
    (
        "SplitToSequence",
        "SequenceAt",
    ): "(double[m, n] y) { one = Constant<value_int = 1>() s = SplitToSequence<axis = 0>(x)"
    " a = SequenceAt(s, one) b = Mul(a, a) y = Mul(b, z) }",
    ("SequenceConstruct", "SequenceInsert", "SequenceErase", "ConcatFromSequence"): "(double[m, n] y) {"
    " zero = Constant<value_int = 0>() one = Constant<value_int = 1>() a = Mul(x, z) b = Exp(x)"
    " s = SequenceConstruct(x, a, b) t = SequenceErase(s, one) u = SequenceInsert(t, a, zero)"
    " y = ConcatFromSequence<axis = 0>(u) }",
    ("SequenceMap",): "(double[m, n] y) { s = SplitToSequence<axis = 0>(x)"
    " t = SequenceMap<body = f (double[1, 2] e) => (double[1, 2] r) { r = Mul(e, e) }>(s)"
    " u = ConcatFromSequence<axis = 0>(t) y = Mul(u, z) }",
    ("Optional", "OptionalGetElement"): "(double[m, n] y) { o = Optional(x) a = OptionalGetElement(o) y = Mul(a, z) }",
    ("If",): "(double[m, n] y) { total = ReduceSum<keepdims = 0>(x) zero = Constant<value = double {0}>()"
    " positive = Greater(total, zero) y = If(positive)<then_branch = a () => (double[3, 2] t) { t = Mul(x, z) },"
    " else_branch = b () => (double[3, 2] e) { e = Add(x, z) }> }",
    ("Loop",): "(double[m, n] y) { count = Constant<value_int = 3>() go = Constant<value = bool {1}>()"
    " y = Loop(count, go, x)<body = b (int64 i, bool c, double[3, 2] state) => (bool d, double[3, 2] after)"
    " { d = Identity(c) wave = Sin(state) after = Mul(wave, z) }> }",
    ("Scan",): "(double[n] last, double[m, n] y) { last, y = Scan<num_scan_inputs = 1, body = b (double[2] state,"
    " double[2] e) => (double[2] after, double[2] out) { mixed = Mul(state, e) after = Add(mixed, e)"
    " out = Tanh(after) }>(z, x) }",
}
"""Operators that need others around them -> a graph of x [3, 2] and z [2] in ONNX's text form."""


def check(model: onnx.ModelProto, inputs: list[torch.Tensor], *, training: bool = False) -> None:
    module = to_module(model).double().train(training)

    def floats(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = module(*arguments)
        kept = results if isinstance(results, tuple) else (results,)
        return tuple(result for result in kept if result.is_floating_point())

    assert any(result.requires_grad for result in floats(*inputs)), "no gradient at all"
    assert torch.autograd.gradcheck(floats, inputs, eps=1e-6, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("operator", "one"),
    [
        pytest.param(operator, one, id=f"{operator}-{i}" if i else operator)
        for operator, cases in CASES.items()
        for i, one in enumerate(cases)
    ],
)
def test_gradient_equals_finite_differences(operator: str, one: Case) -> None:
    check(one.model(operator), one.differentiated(), training=one.training)


@pytest.mark.parametrize("operators", SEVERAL, ids="-".join)
def test_gradient_through_several_nodes_equals_finite_differences(operators: tuple[str, ...]) -> None:
    model = parser.parse_model(OPENING + SEVERAL[operators])
    check(model, [torch.from_numpy(some(3, 2)).requires_grad_(), torch.from_numpy(some(2, seed=1)).requires_grad_()])


def test_every_operator_of_the_table_has_a_case_or_a_reason() -> None:
    elsewhere = ("com.microsoft.nchwc.", "com.microsoft.Nhwc", "ai.onnx.ml.")  # test_nchwc.py, refused, test_ml.py
    table = {operator for operator, _ in RULES if not operator.startswith(elsewhere)}
    known = CASES.keys() | {name for names in SEVERAL for name in names}
    assert table - known - NOT_DIFFERENTIABLE.keys() == set()
    assert known & NOT_DIFFERENTIABLE.keys() == set()
