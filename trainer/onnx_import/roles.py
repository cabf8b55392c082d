"""Which stored tensors are trained, which are running statistics, which stay as they are: and why.

A float tensor is trained when it meets data in float arithmetic: directly, or after being reshaped,
transposed or combined with other stored tensors. One that meets only integers made into floats
(positions, masks) is a table, unless they meet it as features: in a matrix product or a convolution.
Masks, tables of waves and single numbers are frozen wherever they appear, but for a bias of one output.
Values are followed into the graphs inside If, Loop and Scan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx
import torch
from onnx import TensorProto

from onward.trainer.onnx_import.tensor_contents import is_exporter_name, is_integer_table, is_mask, is_sinusoidal_table

Kind = Literal["trained", "statistic", "frozen"]
Origin = Literal["stored", "integers", "data"]


@dataclass(frozen=True)
class Role:
    """What a stored tensor is to training, and the reason as a clause."""

    kind: Kind
    reason: str
    operator: str = ""
    """Where a trained one first meets data."""


# fmt: off
FIRST = (
    "CastLike", "Clip", "CumSum", "Dropout", "Expand", "Pad", "Pow", "Reshape", "Resize", "RotaryEmbedding",
    "SequenceAt", "Slice", "Split", "SplitToSequence", "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze", "Upsample",
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare", "SequenceErase",
)
PACKED = ("MatMulNBits", "MatMulBnb4")
QUANTIZERS = (
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv", "QLinearAdd",
    "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearConcat", "QLinearAveragePool",
    "QLinearGlobalAveragePool", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QEmbedLayerNormalization", "QOrderedMatMul",
)
NONE = (
    "Shape", "Size", "Range", "ConstantOfShape", "EyeLike", "OneHot", "NonMaxSuppression",
    "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix",
)
COMPARISONS = (
    "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf",
    "ArgMax", "ArgMin", "NonZero",
)
# fmt: on
CARRIES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*FIRST, *PACKED), (0,)),
    **dict.fromkeys((*NONE, *COMPARISONS, *QUANTIZERS), ()),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (0,)),  # gradients pass through them (see quant.py)
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"), (0,)),  # gradients pass
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), (0, 3)),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (0, 1)),
    "Where": (1, 2),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "Scatter": (0, 2),
    "TensorScatter": (0, 1),
    "SequenceInsert": (0, 1),
    "BatchNormalization": (0, 1, 2),
    "SoftmaxCrossEntropyLoss": (0,),
    "NegativeLogLikelihoodLoss": (0,),
    "GroupQueryAttention": (0, 1, 2, 3, 4),
    "RoiAlign": (0,),
    "MaxRoiPool": (0,),
    "GridSample": (0, 1),
    "STFT": (0, 2),
}
"""Operator -> the operands whose values reach its result; all of them for operators not named."""

ASIDE: dict[str, str] = {
    **dict.fromkeys(QUANTIZERS, "a scale of quantization"),
    **dict.fromkeys(PACKED, "a scale of quantized weights"),
    **dict.fromkeys(COMPARISONS, "only compared with: comparisons have no gradient"),
    **dict.fromkeys(("RotaryEmbedding", "GroupQueryAttention"), "a table of rotation angles"),
    "Clip": "a bound of Clip",
    "Pad": "the value padded with",
    "Pow": "an exponent",
    "Dropout": "the ratio of Dropout",
    "Resize": "only says how large a result is",
    "Upsample": "only says how large a result is",
    "OneHot": "the values of OneHot",
    "NonMaxSuppression": "thresholds",
}
"""Operator -> what an operand is whose values do not reach its result."""

# fmt: off
WEIGHTED = frozenset((
    "Conv", "ConvTranspose", "DeformConv", "CausalConvWithState", "FusedConv", "NhwcConv", "Gemm", "FusedGemm",
    "BatchNormalization", "LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization",
    "PRelu", "LSTM", "GRU", "RNN", "EmbedLayerNormalization", "SkipLayerNormalization", "BiasGelu",
    "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipGroupNorm", "GroupNorm",
))
ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"))
RAW = frozenset((
    "Add", "Sub", "Mul", "Div", "Cast", "Clip", "Concat", "Gather", "Identity", "Pad", "Reshape", "Resize", "Slice",
    "Squeeze", "Transpose", "Unsqueeze",
))
JOINS = frozenset((
    "Add", "Sub", "Sum", "Where", "Concat", "Max", "Min", "Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze",
    "Expand", "Transpose", "Slice", "Split", "Tile", "Pad", "Gather", "GatherND", "ScatterND", "ScatterElements",
))
# fmt: on
"""WEIGHTED: operators whose stored operands are weights even when they hold a single number; RAW: those that
leave an input what it is, pixels or samples; JOINS: those after which a weight can still be one that was put beside
integers (a bias of attention, to which a mask is added), unlike one multiplied by them."""

RECURRENT_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Operator -> the operands that are the state it begins in."""

NUM_CHANNELS = 16
"""Statistics by which an input is normalised have no more elements than this."""


@dataclass(frozen=True)
class _Flow:
    """What is known of one value: where it comes from, and the stored tensors it carries unmixed with data."""

    origin: Origin
    carried: frozenset[str] = frozenset()
    producer: str = ""
    raw: bool = False
    """It is an input of the graph, rescaled at most."""


def _merged(flows: Iterable[_Flow]) -> _Flow:
    """A value that comes from one of several places, as the results of If and Loop do."""
    found = list(flows)
    origins = {flow.origin for flow in found}
    origin: Origin = "data" if "data" in origins else "integers" if "integers" in origins else "stored"
    return _Flow(origin, frozenset[str]().union(*(flow.carried for flow in found)))


def _chosen(flow: _Flow) -> _Flow:
    """What a branch gives, now that the input has chosen the branch: weights that meet it, or integers."""
    origin: Origin = "data" if flow.carried or flow.origin == "data" else "integers"
    return replace(flow, origin=origin)


@dataclass
class _Analysis:
    weights: Mapping[str, torch.Tensor]
    flows: dict[str, _Flow] = field(default_factory=dict)
    met: dict[str, str] = field(default_factory=dict)  # stored tensor -> the operator in which it met data
    aside: dict[str, str] = field(default_factory=dict)  # stored tensor -> what it is to an operator it only steers
    weighted: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    quantized: set[str] = field(default_factory=set)
    conv_biases: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)

    def walk(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            if node.op_type == "Constant" and node.output[0] in self.weights:
                continue
            if bodies := list(_bodies(node)):
                self._enter(node, bodies)
            else:
                self._visit(node)

    def _visit(self, node: onnx.NodeProto) -> None:
        operands = [self.flows.get(name, _Flow("stored")) for name in node.input]
        chosen = CARRIES.get(node.op_type, tuple(range(len(operands))))
        carriers = [operands[i] for i in chosen if i < len(operands)]
        carried = frozenset[str]().union(*(flow.carried for flow in carriers))
        origin = self._origin(node, operands, carriers)
        self._note(node, operands, chosen)
        if origin == "data":
            self._meet(node, carried, operands)
        elif origin == "integers":
            self._set_aside(carried, "only combined with integers: a table of positions or a mask")
        if node.op_type in ("Sin", "Cos"):  # of stored numbers: the angles of positions
            self._set_aside(carried, "frequencies of sines and cosines")
            carried = frozenset()
        raw = node.op_type in RAW and any(flow.raw for flow in operands)
        raw = raw and all(flow.raw or flow.origin == "stored" for flow in operands)
        if origin == "data" or (origin == "integers" and node.op_type not in JOINS):
            carried = frozenset()
        flow = _Flow(origin, carried, node.op_type, raw)
        self.flows.update(dict.fromkeys(node.output, flow))

    def _note(self, node: onnx.NodeProto, operands: Sequence[_Flow], chosen: Sequence[int]) -> None:
        """What an operator says of its operands by the place they have."""
        if node.op_type == "BatchNormalization":
            self.statistics.update(*(flow.carried for flow in operands[3:5]))
        if node.op_type in ("Conv", "ConvTranspose"):
            self.conv_biases.update(*(flow.carried for flow in operands[2:3]))
        if node.op_type == "Where" and all(flow.origin == "stored" for flow in operands):
            parts = [name for flow in operands[1:] for name in flow.carried]  # zeros, or what hides
            if any(bool((self.weights[name] <= -50).all()) for name in parts):
                self.masks.update(name for name in parts if not self.weights[name].any())
        for i in RECURRENT_STATES.get(node.op_type, ()):
            self.states.update(*(flow.carried for flow in operands[i : i + 1]))
        if node.op_type in ("Sub", "Div") and len(operands) == 2 and operands[0].raw:
            small = (name for name in operands[1].carried if 1 < self.weights[name].numel() <= NUM_CHANNELS)
            self._set_aside(small, "normalises the input")
        if why := ASIDE.get(node.op_type):
            self._set_aside((name for i, flow in enumerate(operands) if i not in chosen for name in flow.carried), why)
        if node.op_type in QUANTIZERS or node.op_type in PACKED:
            self.quantized.update(name for name in node.input if _is_integer(self.weights.get(name)))

    def _set_aside(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.aside.setdefault(name, why)

    def _meet(self, node: onnx.NodeProto, carried: Iterable[str], operands: Sequence[_Flow]) -> None:
        bias = node.op_type == "Add" and any(flow.producer == "MatMul" for flow in operands)
        for name in carried:
            if self.aside.get(name) != "normalises the input":
                self.met.setdefault(name, node.op_type)
            if node.op_type in WEIGHTED or bias:
                self.weighted.add(name)

    def _origin(self, node: onnx.NodeProto, operands: list[_Flow], carriers: list[_Flow]) -> Origin:
        origins = {flow.origin for flow in operands}
        if node.op_type in COMPARISONS or node.op_type in NONE:
            return "stored" if origins <= {"stored"} else "integers"
        if node.op_type in QUANTIZERS or node.op_type == "EmbedLayerNormalization":
            return "stored" if origins <= {"stored"} else "data"
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

    # -- inner graphs

    def _enter(self, node: onnx.NodeProto, bodies: Sequence[onnx.GraphProto]) -> None:
        """Follow the values through If, Loop, Scan and their like; what a branch gives alone still trains."""
        operands = [self.flows.get(name, _Flow("stored")) for name in node.input]
        if node.op_type == "If":
            states, parts = [], [self._inside(body, []) for body in bodies]
            results = [_merged(flows) for flows in zip(*parts, strict=False)]
            if any(flow.origin != "stored" for flow in operands):  # which of them it is depends on the input
                results = [_chosen(flow) for flow in results]
        else:
            counts = [_Flow("integers")] * 2 if node.op_type == "Loop" else []
            given = operands[2:] if counts else operands[-len(bodies[0].input) :]
            num_states = len(given) if counts else max(len(given) - _num_scanned(node), 0)
            states = list(given)
            for _ in range(2):  # what goes round once more meets what the first round made
                results = self._inside(bodies[0], [*counts, *states])[1 if counts else 0 :]
                states[:num_states] = map(_merged, zip(states[:num_states], results[:num_states], strict=False))
            results[:num_states] = states[:num_states]
        for name, flow in zip(node.output, results, strict=False):
            if flow.origin == "data":
                self._meet(node, flow.carried, operands)
                flow = _Flow("data")
            self.flows[name] = replace(flow, producer=node.op_type)

    def _inside(self, body: onnx.GraphProto, inputs: Sequence[_Flow]) -> list[_Flow]:
        """The flows of a body's results; its own names are forgotten again."""
        outer = dict(self.flows)
        self.flows.update(zip((value.name for value in body.input), inputs, strict=False))
        self.flows.update({tensor.name: _Flow("stored") for tensor in body.initializer})
        self.walk(body.node)
        results = [self.flows.get(value.name, _Flow("stored")) for value in body.output]
        self.flows = outer
        return results


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _num_scanned(node: onnx.NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs"), 0)


def _is_integer(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not tensor.is_floating_point()


def find_roles(graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor]) -> dict[str, Role]:
    """The role of every stored float tensor (initializers and Constant nodes), and of quantized weights, by name.

    What is stored inside the graphs of If, Loop and Scan is listed too, as frozen, under `node/name`.
    """
    analysis = _Analysis(weights)
    for value in graph.input:
        if value.name not in weights:
            floats = value.type.tensor_type.elem_type in (1, 10, 11, 16) or not value.type.HasField("tensor_type")
            analysis.flows[value.name] = _Flow("data" if floats else "integers", raw=True)
    for name, tensor in weights.items():
        analysis.flows[name] = _Flow("stored", frozenset([name]) if tensor.is_floating_point() else frozenset())
    analysis.walk(graph.node)
    read = {name for node in graph.node for name in _reads(node)} | {value.name for value in graph.output}
    found = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            found[name] = _role(name, tensor, analysis, read)
        elif name in analysis.quantized and tensor.numel() > 1:
            found[name] = Role("frozen", "stored as integers; train the model it was quantized from")
    return found | dict(_inner_roles(graph))


def promote_to_trained(
    found: Mapping[str, Role], weights: Mapping[str, torch.Tensor], names: Iterable[str]
) -> dict[str, Role]:
    """The roles with those named made weights, whatever they look like; running statistics stay what they are."""
    chosen = {
        name
        for name in names
        if name in found and found[name].kind == "frozen" and name in weights and weights[name].dtype in TRAINED_TYPES
    }
    return {name: Role("trained", "named in model.train") if name in chosen else role for name, role in found.items()}


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for body in _bodies(node):
        yield from (value.name for value in body.output)
        for inner in body.node:
            yield from _reads(inner)


def _inner_roles(graph: onnx.GraphProto) -> Iterator[tuple[str, Role]]:
    """Float tensors that have no place of their own in the main graph."""
    for node in graph.node:
        for body in _bodies(node):
            constants = [
                (inner.output[0], attribute.t)
                for inner in body.node
                for attribute in inner.attribute
                if inner.op_type == "Constant" and attribute.name == "value"
            ]
            for name, tensor in [*((tensor.name, tensor) for tensor in body.initializer), *constants]:
                if tensor.data_type in FLOATS and any(dim > 1 for dim in tensor.dims):
                    why = f"stored inside the body of {node.op_type}; move it to the main graph to train it"
                    yield f"{node.name or node.output[0]}/{name}", Role("frozen", why)
            yield from _inner_roles(body)


TRAINED_TYPES = (torch.float32, torch.float64)
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _role(name: str, tensor: torch.Tensor, analysis: _Analysis, read: set[str]) -> Role:
    if name in analysis.statistics:
        return Role("statistic", "running statistic of a BatchNormalization")
    if name not in read:
        return Role("frozen", "no node reads it")
    if tensor.dtype not in TRAINED_TYPES:
        return Role("frozen", f"stored in {8 * tensor.element_size()} bits, too coarse to train")
    if name not in analysis.met:
        return Role("frozen", analysis.aside.get(name, "meets no data in float arithmetic"))
    operator = analysis.met[name]
    if why := _given_away(name, tensor, analysis):
        return Role("frozen", why)
    return Role("trained", f"weight of {operator}", operator)


def _given_away(name: str, tensor: torch.Tensor, analysis: _Analysis) -> str:
    """Why a tensor that meets data is none of the weights all the same; "" if it is one."""
    operator, weighted = analysis.met[name], name in analysis.weighted
    if tensor.numel() == 1 and (not weighted or (tensor.ndim == 0 and is_exporter_name(name))):
        return "a single number"  # also the 0 of a mask, made in the graph, that is added to a product
    if is_mask(tensor) or name in analysis.masks:
        return "a mask"
    if name in analysis.states and not tensor.any():
        return "the zero state a recurrent layer begins in"
    if operator == "InstanceNormalization" and is_exporter_name(name) and bool(((tensor == 0) | (tensor == 1)).all()):
        return "the neutral scale or bias of a normalisation whose own ones come after it"
    if name in analysis.conv_biases and re.fullmatch(r"val_\d+", name) and not tensor.any():
        return "zeros an exporter gave convolutions that have no bias"
    if not weighted and (operator in ELEMENTWISE or operator.startswith("Gather")) and is_sinusoidal_table(tensor):
        return "a table of sines, cosines or positions"
    if not weighted and operator in ELEMENTWISE and is_integer_table(tensor):
        return "a table of whole numbers: a grid, strides or distances"
    return ""
