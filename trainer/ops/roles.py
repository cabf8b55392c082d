"""Which stored tensors are trained, which are running statistics, which stay as they are: and why.

A float tensor is trained when it meets data in float arithmetic: directly, or after being reshaped,
transposed or combined with other stored tensors. One that meets only integers made into floats
(positions, masks) is a table, unless they meet it as features: in a matrix product or a convolution.
Masks and single numbers are frozen wherever they appear, but for a bias of one output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import onnx
import torch

Kind = Literal["trained", "statistic", "frozen"]


@dataclass(frozen=True)
class Role:
    """What an initializer is to training, and the reason as a clause."""

    kind: Kind
    reason: str


# fmt: off
FIRST = (
    "CastLike", "Clip", "CumSum", "Dropout", "Expand", "Pad", "Pow", "Reshape", "Resize", "RotaryEmbedding",
    "SequenceAt", "Slice", "Split", "SplitToSequence", "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze", "Upsample",
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)
NONE = (
    "Shape", "Size", "Range", "ConstantOfShape", "EyeLike", "OneHot", "QuantizeLinear", "DequantizeLinear",
)
COMPARISONS = (
    "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf",
    "ArgMax", "ArgMin", "NonZero",
)
# fmt: on
CARRIES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(FIRST, (0,)),
    **dict.fromkeys((*NONE, *COMPARISONS), ()),
    "Where": (1, 2),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "BatchNormalization": (0, 1, 2),
    "SoftmaxCrossEntropyLoss": (0,),
    "NegativeLogLikelihoodLoss": (0,),
}
"""Operator -> the operands whose values reach its result; all of them for operators not named."""

# fmt: off
WEIGHTED = frozenset((
    "Conv", "ConvTranspose", "Gemm", "BatchNormalization", "LayerNormalization", "InstanceNormalization",
    "GroupNormalization", "RMSNormalization", "PRelu",
))
# fmt: on
"""Operators whose stored operands are weights even when they hold a single number."""


@dataclass
class _Flow:
    """What is known of one value: where it comes from, and the stored tensors it carries unmixed with data."""

    origin: Literal["stored", "integers", "data"]
    carried: frozenset[str] = frozenset()
    producer: str = ""


@dataclass
class _Analysis:
    weights: Mapping[str, torch.Tensor]
    flows: dict[str, _Flow] = field(default_factory=dict)
    met: dict[str, str] = field(default_factory=dict)  # stored tensor -> the operator in which it met data
    weighted: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)

    def visit(self, node: onnx.NodeProto) -> None:
        operands = [self.flows.get(name, _Flow("stored")) for name in node.input]
        chosen = CARRIES.get(node.op_type, tuple(range(len(operands))))
        carriers = [operands[i] for i in chosen if i < len(operands)]
        carried = frozenset[str]().union(*(flow.carried for flow in carriers))
        origin = self._origin(node, operands, carriers)
        if node.op_type == "BatchNormalization":
            self.statistics.update(*(flow.carried for flow in operands[3:5]))
        if origin == "data":
            for name in carried:
                self.met.setdefault(name, node.op_type)
                bias = node.op_type == "Add" and any(flow.producer == "MatMul" for flow in operands)
                if node.op_type in WEIGHTED or bias:
                    self.weighted.add(name)
        flow = _Flow(origin, carried if origin == "stored" else frozenset(), node.op_type)
        self.flows.update(dict.fromkeys(node.output, flow))

    def _origin(
        self, node: onnx.NodeProto, operands: list[_Flow], carriers: list[_Flow]
    ) -> Literal["stored", "integers", "data"]:
        origins = {flow.origin for flow in operands}
        if node.op_type in COMPARISONS or node.op_type in NONE:
            return "stored" if origins <= {"stored"} else "integers"
        if any(flow.origin == "data" for flow in carriers):
            return "data"
        if node.op_type.startswith("Gather") and operands[0].carried and operands[1].origin != "stored":
            return "data"  # an embedding: rows of a table, chosen by the input
        if node.op_type == "Where" or node.op_type.startswith(("Gather", "Scatter")):
            carriers = operands  # what is chosen depends on the input, unlike what is only given a shape by it
        if self._is_layer(node, operands):
            return "data"
        return "integers" if any(flow.origin != "stored" for flow in carriers) else "stored"

    def _is_layer(self, node: onnx.NodeProto, operands: list[_Flow]) -> bool:
        """Whether integers, made into floats, meet a weight as features do: one-hot rows, pixels, counts.

        A single row times positions is a table of angles, not a layer.
        """
        if len(operands) < 2 or operands[0].origin != "integers":
            return False
        shapes = [self.weights[name].shape for name in operands[1].carried]
        rows = any(len(shape) >= 2 and shape[-2] > 1 for shape in shapes)
        return rows if node.op_type == "MatMul" else bool(shapes) and node.op_type in WEIGHTED


def roles(graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor]) -> dict[str, Role]:
    """The role of every stored float tensor (initializers and Constant nodes), by name."""
    analysis = _Analysis(weights)
    for value in graph.input:
        if value.name not in weights:
            floats = value.type.tensor_type.elem_type in (1, 10, 11, 16)
            analysis.flows[value.name] = _Flow("data" if floats else "integers")
    for name, tensor in weights.items():
        analysis.flows[name] = _Flow("stored", frozenset([name]) if tensor.is_floating_point() else frozenset())
    for node in graph.node:
        if node.op_type != "Constant" or node.output[0] not in weights:
            analysis.visit(node)
    return {name: _role(name, tensor, analysis) for name, tensor in weights.items() if tensor.is_floating_point()}


def _role(name: str, tensor: torch.Tensor, analysis: _Analysis) -> Role:
    if name in analysis.statistics:
        return Role("statistic", "running statistic of a BatchNormalization")
    if name not in analysis.met:
        return Role("frozen", "meets no data in float arithmetic")
    if tensor.numel() == 1 and name not in analysis.weighted:
        return Role("frozen", "a single number")
    if _is_mask(tensor):
        return Role("frozen", "a mask")
    return Role("trained", f"weight of {analysis.met[name]}")


def _is_mask(tensor: torch.Tensor) -> bool:
    """Zeros and large negative numbers; or a matrix that holds both zeros and ones and nothing else."""

    def only(values: torch.Tensor, matrix: bool) -> bool:
        allowed = (values == 0) | (values <= -50)
        return bool((allowed | (values == 1) if matrix else allowed).all())

    matrix = tensor.ndim >= 2 and tensor.shape[-1] > 1 and tensor.shape[-2] > 1
    flat = tensor.reshape(-1)
    if not only(flat[:64], matrix) or not only(flat, matrix):  # most weights are told by their first few values
        return False
    return bool((flat <= -50).any()) or (matrix and bool((flat == 0).any() and (flat == 1).any()))
