"""What operators do with their operands, as the analysis of roles (graph_flow.py) and the lowering need it."""

from __future__ import annotations

# fmt: off
MOVES = frozenset((
    "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Max",
    "MaxPool", "Min", "Pad", "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose",
    "Unsqueeze", "Where",
))
"""Operators whose results are elements of their operands: the same for integers and for their floating-point values."""

ACTIVATIONS = ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax")
POOLS = ("QLinearAveragePool", "QLinearGlobalAveragePool")
QUANTIZERS = (
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv", "QLinearAdd",
    "QLinearMul", *ACTIVATIONS, "QLinearConcat", *POOLS, "QLinearWhere", "QGemm", "QAttention", "MatMulInteger",
    "ConvInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QEmbedLayerNormalization",
    "QOrderedMatMul",
)
QUANTIZED_WEIGHTS = ("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "QMoE")
VALUE_FREE = (
    "Shape", "Size", "Range", "ConstantOfShape", "EyeLike", "OneHot", "NonMaxSuppression",
    "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix",
)
COMPARISONS = (
    "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf",
    "ArgMax", "ArgMin", "NonZero",
)
FIRST_ONLY = (
    "CastLike", "Clip", "CumSum", "Dropout", "Expand", "Pad", "Reshape", "Resize", "RotaryEmbedding",
    "SequenceAt", "Slice", "Split", "SplitToSequence", "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze", "Upsample",
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare", "SequenceErase", "Gather", "GatherElements", "GatherND", "RoiAlign",
    "MaxRoiPool", "Scaler", "ArrayFeatureExtractor", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss",
    *QUANTIZED_WEIGHTS,
)
# fmt: on

DIFFERENTIABLE_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(FIRST_ONLY, (0,)),
    **dict.fromkeys((*VALUE_FREE, *COMPARISONS, *QUANTIZERS), ()),
    # after the general entry of QUANTIZERS, because the later entry wins:
    # gradients pass through these as through the identity (ops/quantized/quant.py)
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), (0,)),
    **dict.fromkeys(("QLinearMatMul", "QLinearAdd", "QLinearMul"), (0, 3)),
    **dict.fromkeys((*ACTIVATIONS, *POOLS), (0,)),
    "QLinearConv": (0, 3, 8),
    "QGemm": (0, 3, 6),
    "QLinearWhere": (1, 4),
    "MatMulIntegerToFloat": (0, 1, 6),
    "DynamicQuantizeMatMul": (0, 1, 4),
    "QLinearConcat": tuple(range(2, 999, 3)),
    # the last one is its bias
    "MatMulNBits": (0, 5),
    "GatherBlockQuantized": (),
    # input, router scores, biases, router weights
    "QMoE": (0, 1, 4, 7, 14),
    "DynamicQuantizeLSTM": (0, 3, 5, 6, 7),
    "QAttention": (0, 1, 2, 8),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (0, 1)),
    "Where": (1, 2),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "Scatter": (0, 2),
    "TensorScatter": (0, 1),
    "SequenceInsert": (0, 1),
    "BatchNormalization": (0, 1, 2),
    "GroupQueryAttention": (0, 1, 2, 3, 4),
    "GridSample": (0, 1),
    "STFT": (0, 2),
}
"""Operator -> the operands whose values reach its result; every operand for operators that are not listed."""

PARAMETER_MEANING: dict[str, str] = {
    **dict.fromkeys(QUANTIZERS, "a scale of quantization"),
    **dict.fromkeys(QUANTIZED_WEIGHTS, "a scale of quantized weights"),
    **dict.fromkeys(COMPARISONS, "only compared with: comparisons have no gradient"),
    **dict.fromkeys(("RotaryEmbedding", "GroupQueryAttention"), "a table of rotation angles"),
    "Clip": "a bound of Clip",
    "Pad": "the value padded with",
    "Dropout": "the ratio of Dropout",
    "Resize": "only says how large a result is",
    "Upsample": "only says how large a result is",
    "OneHot": "the values of OneHot",
    "NonMaxSuppression": "thresholds",
    "Scaler": "normalises the input",
}
"""Operator -> what its operands are that are not in DIFFERENTIABLE_OPERANDS."""

# fmt: off
LAYERS = frozenset((
    "Conv", "ConvTranspose", "DeformConv", "CausalConvWithState", "FusedConv", "NhwcConv", "Gemm", "FusedGemm",
    "BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization",
    "QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
    "MatMulNBits", "QAttention", "MoE", "QMoE",
    "PRelu", "LSTM", "GRU", "RNN", "DynamicQuantizeLSTM", "LinearClassifier", "LinearRegressor",
    "EmbedLayerNormalization", "SkipLayerNormalization", "BiasGelu",
    "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipGroupNorm", "GroupNorm",
))
"""Operators whose stored operands are weights even if they hold a single number."""
ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"))
KEEPS_INPUT = frozenset((
    "Add", "Sub", "Mul", "Div", "Cast", "Clip", "Concat", "Gather", "Identity", "Pad", "Reshape", "Resize", "Slice",
    "Squeeze", "Transpose", "Unsqueeze", "Scaler", "Imputer", "FeatureVectorizer",
))
"""Operators after which an input is still pixels or samples, only rescaled or rearranged."""
KEEPS_WEIGHT = frozenset((
    "Add", "Sub", "Sum", "Where", "Concat", "Max", "Min", "Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze",
    "Expand", "Transpose", "Slice", "Split", "Tile", "Pad", "Gather", "GatherND", "ScatterND", "ScatterElements",
))
"""Operators after which a weight combined with integers can still be a weight, such as an attention bias to which a
mask is added; a weight multiplied by integers cannot."""
# fmt: on

ZERO_POINTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (2,)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), (2, 5, 7)),
    **dict.fromkeys((*ACTIVATIONS, *POOLS), (2, 4)),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (2, 3)),
    "QLinearConcat": tuple(range(1, 999, 3)),
    "QLinearWhere": (3, 6, 8),
    "QGemm": (2, 5, 8),
    "MatMulIntegerToFloat": (4, 5),
    "DynamicQuantizeMatMul": (3,),
    # with the block of each column (g_idx), and the rows that are looked up
    "MatMulNBits": (3, 4),
    "GatherBlockQuantized": (1, 3),
    "QMoE": (11, 12, 13),
    # with the lengths of sequences
    "DynamicQuantizeLSTM": (4, 9, 11),
    # with the mask
    "QAttention": (5, 6, 7),
}
"""Operator -> the operands that are zero points, which are no weights."""

INITIAL_STATES = {"LSTM": (5, 6), "DynamicQuantizeLSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Operator -> the operands that are its initial state."""
