"""Follow the tensors that an ONNX graph stores through its nodes, until they are combined with data.

Every value has an origin (stored, integers, data) and the stored tensors that it carries:

    pixels (data) ---- Sub ---- Conv --- BatchNormalization --- Add -------- MatMul --- scores (data)
                        |        |        |      |               |            |
                      mean [3]   W     scale,   mean,       Sin(Mul(      Transpose
                                       bias     var        positions,         |
                                                           freqs))            V

    mean            frozen     normalises the input: subtracted from pixels, one number for each channel
    W               trained    combined with data by Conv
    scale, bias     trained    combined with data by BatchNormalization
    mean, var       statistic  operands 3 and 4 of a BatchNormalization
    freqs           frozen     combined with integers (positions) only, and then a sine
    V               trained    carried through Transpose, then combined with data by MatMul

Integers made into floats (positions, masks) are not data, unless a layer reads them as features: in a matrix product
with several rows or in a convolution. Values are also followed into the graphs inside If, Loop and Scan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx
import torch

from onward.trainer.onnx_graph.files.element_types import DTYPES
from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, attributes_of, subgraphs
from onward.trainer.onnx_graph.surgery.training_norms import BATCH_STATISTICS, BY_ROW
from onward.trainer.onnx_import.roles.role_tables import (
    COMPARISONS,
    DIFFERENTIABLE_OPERANDS,
    INITIAL_STATES,
    KEEPS_INPUT,
    KEEPS_WEIGHT,
    LAYERS,
    PARAMETER_MEANING,
    QUANTIZED_WEIGHTS,
    QUANTIZERS,
    VALUE_FREE,
    ZERO_POINTS,
)
from onward.trainer.onnx_import.roles.scaled_integers import is_code, makes_floats
from onward.trainer.onnx_import.roles.tensor_contents import MASKED_BELOW

Origin = Literal["stored", "integers", "data"]

COMPUTED_STATISTIC = "a statistic of a BatchNormalization behind arithmetic: it normalises, but is never updated"
PLACEHOLDER_STATISTIC = "not a running statistic: its BatchNormalization always normalises by its own input"


@dataclass(frozen=True)
class Flow:
    """What is known of one value of the graph."""

    origin: Origin
    carried: frozenset[str] = frozenset()
    """The stored tensors that it is made of, as long as they are not combined with data."""
    producer: str = ""
    """The operator that computed it."""
    raw: bool = False
    """Whether it is an input of the graph, at most rescaled or rearranged."""
    shifted: str = ""
    """Add or Sub, if something was added to a raw value or subtracted from it."""
    scale: str | None = None
    """The stored tensor that a raw value was multiplied or divided by, "" if it was computed."""
    projected: frozenset[str] = frozenset()
    """The stored matrices of a product with a raw value, as long as nothing but a number is combined with it."""
    alias: str = ""
    """The stored tensor that it is, unchanged."""
    centre: str = ""
    """The stored tensor that was subtracted from it, as long as it is only multiplied afterwards."""
    codes: frozenset[str] = frozenset()
    """The stored integers that it is made of, as long as it is no float."""


def _merged(flows: Iterable[Flow]) -> Flow:
    """Return the flow of a value that is one of several, such as the result of an If."""
    merged = list(flows)
    origins = {flow.origin for flow in merged}
    origin: Origin = "stored"
    if "data" in origins:
        origin = "data"
    elif "integers" in origins:
        origin = "integers"
    return Flow(origin, _carried(merged))


def _carried(flows: Iterable[Flow]) -> frozenset[str]:
    return frozenset[str]().union(*(flow.carried for flow in flows))


def _selected_by_input(flow: Flow) -> Flow:
    """Return the flow of a branch's result when the input selects the branch.

    A weight that a branch returns is then combined with data; any other stored number depends on the input.
    """
    origin: Origin = "data" if flow.carried or flow.origin == "data" else "integers"
    return replace(flow, origin=origin)


@dataclass
class GraphFlow:
    """One pass over the nodes in their order. The sets hold names of stored tensors."""

    weights: Mapping[str, torch.Tensor]
    flows: dict[str, Flow] = field(default_factory=dict)
    first_operator: dict[str, str] = field(default_factory=dict)
    """Stored tensor -> the operator that first combined it with data."""
    frozen_reason: dict[str, str] = field(default_factory=dict)
    """Stored tensor -> why it is not a weight unless it is combined with data elsewhere."""
    layer_operands: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    quantized: set[str] = field(default_factory=set)
    """Stored integers that quantized operators read, or that become floats."""
    conv_biases: set[str] = field(default_factory=set)
    by_row: set[str] = field(default_factory=set)
    """Scales and biases with a number for each place in the batch."""
    masks: set[str] = field(default_factory=set)
    exponents: set[str] = field(default_factory=set)
    normalises: set[str] = field(default_factory=set)
    """Subtracted from an input, or what an input is divided by."""
    rescales: dict[str, str] = field(default_factory=dict)
    """Factor of an input, or what is added to the product -> the other one of the two, "" if there is none."""
    centres: set[str] = field(default_factory=set)
    """Subtracted in front of a factor and a shift of the same shape: x - centre, times factor, plus shift."""
    norm_weights: dict[str, frozenset[str]] = field(default_factory=dict)
    """Running statistic -> scale and bias of its BatchNormalization."""
    waves: dict[str, set[str]] = field(default_factory=dict)
    """Matrix that projects an input -> "Sin" and "Cos" as far as they read the product alone."""
    followed: set[str] = field(default_factory=set)
    """What is computed from the input or returned depends on these by differentiable operations."""

    def visit_all(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            # its flow was entered with those of the initializers; a visit would replace it by one that carries nothing
            if node.op_type == "Constant" and node.output[0] in self.weights:
                continue
            if bodies := list(subgraphs(node)):
                self._visit_subgraphs(node, bodies)
            else:
                self._visit(node)

    def _visit(self, node: onnx.NodeProto) -> None:
        operands = [self.flows.get(name, Flow("stored")) for name in node.input]
        # only the operands whose values reach the result can carry a weight further: a bound of Clip or an exponent of
        # Pow is read, but is not a part of it
        chosen = DIFFERENTIABLE_OPERANDS.get(node.op_type, tuple(range(len(operands))))
        carriers = [operands[i] for i in chosen if i < len(operands)]
        carried = _carried(carriers)
        origin = self._origin(node, operands, carriers)
        self._record_operand_meanings(node, operands, chosen)
        # Combined with integers alone, a tensor is frozen only provisionally: `first_operator` has precedence over
        # `frozen_reason`, so a table that is also combined with data elsewhere is trained.
        if origin == "data":
            self._combine_with_data(node, carried, operands)
        elif origin == "integers":
            self._freeze(carried, "only combined with integers: a table of positions or a mask")
        if origin != "stored":
            self.followed |= carried
        if node.op_type in ("Sin", "Cos"):  # rotation angles computed from positions are not features
            self._freeze(carried, "frequencies of sines and cosines")
            carried = frozenset()
            for name in operands[0].projected:
                self.waves.setdefault(name, set()).add(node.op_type)
        # `raw` lasts as long as the value is still pixels: mean and standard deviation are subtracted from these alone,
        # while the same nodes later in the network are biases and scales
        raw = node.op_type in KEEPS_INPUT and any(flow.raw for flow in operands)
        if not all(flow.raw or flow.origin == "stored" for flow in operands):
            raw = False
        # a weight combined with data has its role; what follows is a feature of the network
        if origin == "data" or (origin == "integers" and node.op_type not in KEEPS_WEIGHT):
            carried = frozenset()
        codes = frozenset[str]().union(*(flow.codes for flow in carriers))
        if makes_floats(node):
            self.quantized |= codes
            codes = frozenset()
        flow = Flow(origin, carried, node.op_type, raw, alias=self._alias(node, operands), codes=codes)
        flow = self._follow_centre(node, operands, self._follow_input(node, operands, flow))
        self.flows.update(dict.fromkeys(node.output, flow))

    def _follow_input(self, node: onnx.NodeProto, operands: Sequence[Flow], flow: Flow) -> Flow:
        """Record by what an input is scaled and shifted, and return the flow of the result with what was found so far.

        (x - mean) / deviation, and x * factor + minimum. Each is done once; what comes later is learned.
        """
        if len(operands) == 2 and node.op_type in ("MatMul", "Gemm") and operands[0].raw:
            return replace(flow, projected=operands[1].carried)
        projected = frozenset[str]().union(*(operand.projected for operand in operands))
        only_numbers_join = all(operand.projected or self._is_number(operand) for operand in operands)
        if projected and only_numbers_join:
            flow = replace(flow, projected=projected)
        data = next((operand for operand in operands if operand.raw), None)
        if data is None or not flow.raw:
            return flow
        flow = replace(flow, shifted=data.shifted, scale=data.scale)
        other = next((operand for operand in operands if not operand.raw), None)
        arithmetic = len(operands) == 2 and node.op_type in ("Add", "Sub", "Mul", "Div")
        if not arithmetic or other is None or self._is_number(other):
            return flow
        factor = node.op_type == "Mul" and data.scale is None
        factor = factor and all(_is_vector(self.weights[name]) for name in other.carried)
        takes_off = node.op_type in ("Sub", "Div") and operands[0] is data
        # behind a subtraction, a factor is one over a deviation
        if takes_off or (factor and data.shifted == "Sub"):
            self.normalises |= other.carried
        elif factor:
            self.rescales.update(dict.fromkeys(other.carried, ""))
        elif node.op_type == "Add" and not data.shifted and self._same_shape(other.alias, data.scale):
            self.rescales.update({other.alias: data.scale or "", data.scale or "": other.alias})
        if node.op_type in ("Add", "Sub"):
            return replace(flow, shifted=node.op_type)
        return replace(flow, scale=other.alias)

    def _follow_centre(self, node: onnx.NodeProto, operands: Sequence[Flow], flow: Flow) -> Flow:
        """Record x - centre that a factor and a shift follow, and return the flow of the result with its centre."""
        if node.op_type in ("Cast", "Identity") and operands:
            return replace(flow, centre=operands[0].centre)
        if len(operands) != 2 or node.op_type not in ("Sub", "Mul", "Div", "Add"):
            return flow
        data, other = operands if operands[0].origin == "data" else operands[::-1]
        if data.origin != "data" or other.origin != "stored" or not other.carried:
            return flow
        if node.op_type == "Sub":
            return replace(flow, centre=other.alias if operands[0] is data else "")
        shape = self.weights[data.centre].shape if data.centre else None
        if any(self.weights[name].shape != shape for name in other.carried):
            return flow
        if node.op_type == "Add":
            self.centres.add(data.centre)
            return flow
        return replace(flow, centre=data.centre)

    def _same_shape(self, shift: str, factor: str | None) -> bool:
        return bool(shift) and factor in self.rescales and self.weights[shift].shape == self.weights[factor].shape

    def _is_number(self, flow: Flow) -> bool:
        return flow.origin == "stored" and all(self.weights[name].numel() == 1 for name in flow.carried)

    def _alias(self, node: onnx.NodeProto, operands: Sequence[Flow]) -> str:
        """Return the stored tensor that the node returns unchanged: by Identity, or by a Cast to its own type."""
        alias = operands[0].alias if node.op_type in ("Identity", "Cast") and operands else ""
        to = attributes_of(node).get("to")
        if to is None or not alias:
            return alias
        return alias if DTYPES.get(to) == self.weights[alias].dtype else ""

    def _record_operand_meanings(self, node: onnx.NodeProto, operands: Sequence[Flow], chosen: Sequence[int]) -> None:
        """Record what the position of an operand says about the stored tensors in it."""
        if node.op_type == "BatchNormalization":
            # behind arithmetic there is no tensor that an update could be written to, and updating one of the two
            # without the other would make them statistics of different data
            if mark := attributes_of(node).get(BATCH_STATISTICS):
                self._freeze(_carried(operands[3:5]), PLACEHOLDER_STATISTIC)
                if mark == BY_ROW:
                    self.by_row |= _carried(operands[1:3])
            elif all(flow.alias for flow in operands[3:5]):
                self.statistics.update(flow.alias for flow in operands[3:5])
                self.norm_weights.update({flow.alias: _carried(operands[1:3]) for flow in operands[3:5]})
            else:
                self._freeze(_carried(operands[3:5]), COMPUTED_STATISTIC)
        if node.op_type in ("Conv", "ConvTranspose"):
            self.conv_biases |= _carried(operands[2:3])
        # a mask: the zeros look like an all-zero weight, the other operand shows what they are
        if node.op_type == "Where" and all(flow.origin == "stored" for flow in operands[1:]):
            parts = _carried(operands[1:])  # Where(condition, 0, -10000)
            if any(bool((self.weights[name] <= MASKED_BELOW).all()) for name in parts):
                self.masks.update(name for name in parts if not self.weights[name].any())
        if node.op_type == "Pow":
            self.exponents |= operands[1].carried
        for i in INITIAL_STATES.get(node.op_type, ()):
            self.states |= _carried(operands[i : i + 1])
        if why := PARAMETER_MEANING.get(node.op_type):
            # only the other operands: the data operand of a Clip may well be a weight
            self._freeze(_carried(flow for i, flow in enumerate(operands) if i not in chosen), why)
        if node.op_type in QUANTIZERS or node.op_type in QUANTIZED_WEIGHTS:
            places = ZERO_POINTS.get(node.op_type, ())
            others = (name for place, name in enumerate(node.input) if place not in places)
            self.quantized.update(name for name in others if _is_integer(self.weights.get(name)))

    def _freeze(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.frozen_reason.setdefault(name, why)

    def _combine_with_data(self, node: onnx.NodeProto, carried: Iterable[str], operands: Sequence[Flow]) -> None:
        # an Add after a MatMul is the bias of a linear layer, and may hold a single number
        bias = node.op_type == "Add" and any(flow.producer == "MatMul" for flow in operands)
        for name in carried:
            self.first_operator.setdefault(name, node.op_type)
            if node.op_type in LAYERS or bias:
                self.layer_operands.add(name)

    def _origin(self, node: onnx.NodeProto, operands: list[Flow], carriers: list[Flow]) -> Origin:
        origins = {flow.origin for flow in operands}
        # the result of a comparison, or of Shape, has no gradient, whatever its operands are
        if node.op_type in COMPARISONS or node.op_type in VALUE_FREE:
            return "stored" if origins <= {"stored"} else "integers"
        # the integers that enter here are codes of numbers, or ids of rows; what comes out are features
        if node.op_type in QUANTIZERS or node.op_type == "EmbedLayerNormalization":
            return "stored" if origins <= {"stored"} else "data"
        if any(flow.origin == "data" for flow in carriers):
            return "data"
        if node.op_type.startswith("Gather") and operands[0].carried and operands[1].origin != "stored":
            return "data"  # an embedding: the input selects rows of a table
        if node.op_type == "Where" or node.op_type.startswith(("Gather", "Scatter")):
            carriers = operands  # indices and conditions that depend on the input make the result depend on it
        if self._is_layer(node, operands):
            return "data"
        return "integers" if any(flow.origin != "stored" for flow in carriers) else "stored"

    def _is_layer(self, node: onnx.NodeProto, operands: list[Flow]) -> bool:
        """Return whether a layer reads integers as features: one-hot rows, pixels or counts.

        A product of positions with a matrix of one row is a table of angles, not a layer.
        """
        if len(operands) < 2 or operands[0].origin != "integers":
            return False
        shapes = [self.weights[name].shape for name in operands[1].carried]
        rows = any(len(shape) >= 2 and shape[-2] > 1 for shape in shapes)
        return rows if node.op_type == "MatMul" else bool(shapes) and node.op_type in LAYERS

    # -- inner graphs

    def _visit_subgraphs(self, node: onnx.NodeProto, bodies: Sequence[onnx.GraphProto]) -> None:
        """Follow the values through If, Loop, Scan and SequenceMap into their results."""
        operands = [self.flows.get(name, Flow("stored")) for name in node.input]
        # both branches are visited from the same state, since either may run
        if node.op_type == "If":
            states = []
            parts = [self._inside(body, []) for body in bodies]
            results = [_merged(flows) for flows in zip(*parts, strict=False)]
            if any(flow.origin != "stored" for flow in operands):  # the input selects the branch
                results = [_selected_by_input(flow) for flow in results]
        else:
            # Loop passes (iteration number, condition) to its body before the loop state
            counts = [Flow("integers")] * 2 if node.op_type == "Loop" else []
            given = operands[2:] if counts else operands[-len(bodies[0].input) :]
            num_states = len(given) if counts else max(len(given) - attributes_of(node).get("num_scan_inputs", 0), 0)
            states = list(given)
            # twice: in the second iteration the loop state is what the first one computed
            for _ in range(2):
                results = self._inside(bodies[0], [*counts, *states])[1 if counts else 0 :]
                states[:num_states] = map(_merged, zip(states[:num_states], results[:num_states], strict=False))
            # the loop may also run zero times: then its result is the initial state, which `states` has merged
            results[:num_states] = states[:num_states]
        # a weight that leaves the body as data has been combined inside it; seen from outside, the If or the Loop did
        # it
        for name, flow in zip(node.output, results, strict=False):
            if flow.origin == "data":
                self._combine_with_data(node, flow.carried, operands)
                flow = Flow("data")
            self.flows[name] = replace(flow, producer=node.op_type)

    def _inside(self, body: onnx.GraphProto, inputs: Sequence[Flow]) -> list[Flow]:
        """Return the flows of a body's results. Names of the body are local to it."""
        # a body may reuse names of the outer graph for other values, so the outer flows are restored at the end; what
        # was found out about stored tensors stays
        outer = dict(self.flows)
        self.flows.update(zip((value.name for value in body.input), inputs, strict=False))
        self.flows.update({tensor.name: Flow("stored") for tensor in body.initializer})
        self.visit_all(body.node)
        results = [self.flows.get(value.name, Flow("stored")) for value in body.output]
        self.flows = outer
        return results


def _is_vector(tensor: torch.Tensor) -> bool:
    return sum(length > 1 for length in tensor.shape) <= 1


def _is_integer(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not tensor.is_floating_point()


def flow_of(graph: onnx.GraphProto, weights: Mapping[str, torch.Tensor]) -> GraphFlow:
    """Return the analysis of a graph with the stored tensors `weights`."""
    flow = GraphFlow(weights)
    for value in graph.input:
        if value.name not in weights:
            # a sequence or optional may hold floats
            floats = value.type.tensor_type.elem_type in FLOAT_TYPES or not value.type.HasField("tensor_type")
            flow.flows[value.name] = Flow("data" if floats else "integers", raw=True)
    for name, tensor in weights.items():
        carried = frozenset([name]) if tensor.is_floating_point() else frozenset[str]()
        codes = frozenset([name]) if tensor.numel() > 1 and is_code(tensor) else frozenset[str]()
        flow.flows[name] = Flow("stored", carried, alias=name, codes=codes)
    flow.visit_all(graph.node)
    for value in graph.output:
        flow.followed |= flow.flows.get(value.name, Flow("stored")).carried
    return flow
