"""Recognise where probabilities are computed from scores: by an operator, or by the nodes that an exporter wrote out.

    scores --- Softmax ------------------------------------------------------------ probabilities
    scores --- Sub --- Exp --+------------------ Div (or Mul after Reciprocal) ---- probabilities     with or without
        '- ReduceMax -'      '- ReduceSum --------'                                                   ReduceMax and Sub
    scores --- Neg --- Exp --- Add 1 --- Reciprocal (or Div) ---------------------- probabilities     a sigmoid
    scores --- Mul 0.5 --- Tanh --- Add 1 --- Mul 0.5 ----------------------------- probabilities     a sigmoid, too

Between the nodes there may be Identity, casts between floats, and nodes that only add an axis of length 1 to a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx

from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, SMALL, Index, attributes_of, domain_of
from onward.trainer.onnx_graph.files.model_files import stored_array

Kind = Literal["softmax", "log_softmax", "log_of_softmax", "sigmoid"]
"""A loss of scores may read the result of `log_softmax`, of which the softmax is the same as that of the scores. That
of `log_of_softmax` is minus infinity where the softmax is 0 in the type of the file."""
NAMES: dict[Kind, str] = {
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
    "log_of_softmax": "the logarithm of a Softmax",
    "sigmoid": "Sigmoid",
}

SUMS = ("ReduceSum", "ReduceL1")
"""Operators that add up what Exp returns, which is positive."""
ADDS_AXIS = ("Unsqueeze", "Reshape", "Expand")
"""Operators by which a sum that has lost its axis gets it back."""


@dataclass(frozen=True)
class Activation:
    """A softmax, its logarithm or a sigmoid, and the tensor of scores that it reads."""

    kind: Kind
    scores: str
    axis: int | None = None
    """The axis of the classes, as the file writes it; None for a sigmoid, and where the operator's default holds."""
    written_out: bool = False
    """Whether several nodes compute it."""

    @property
    def name(self) -> str:
        """How messages name it."""
        is_operator = not self.written_out or self.kind == "log_of_softmax"
        return NAMES[self.kind] if is_operator else f"the nodes of a {NAMES[self.kind]} that is written out"


def activation_of(index: Index, tensor: str) -> Activation | None:
    """Return the activation whose result a tensor is; None if it is none of a known form.

    A softmax over several axes at once is not one over classes, and is not returned.
    """
    graph = _Graph(index)
    return graph.sigmoid(tensor) or graph.softmax(tensor) or graph.log_softmax(tensor)


@dataclass(frozen=True)
class _Graph:
    index: Index

    # -- the three activations

    def softmax(self, tensor: str) -> Activation | None:
        if found := self.quotient(tensor):
            return found
        # exp(log_softmax(x)) is a softmax, too
        exponential = self.node(tensor, "Exp")
        found = self.difference(exponential.input[0]) if exponential else None
        return replace(found, kind="softmax", written_out=True) if found else None

    def log_softmax(self, tensor: str) -> Activation | None:
        if found := self.difference(tensor):
            return found
        logarithm = self.node(tensor, "Log")
        found = self.quotient(logarithm.input[0]) if logarithm else None
        return replace(found, kind="log_of_softmax", written_out=True) if found else None

    def sigmoid(self, tensor: str) -> Activation | None:
        node = self.node(tensor)
        if node is None:
            return None
        if node.op_type == "Sigmoid":
            return Activation("sigmoid", node.input[0])
        scores = self.logistic(node) or self.half_of_tanh(node)
        return Activation("sigmoid", scores, written_out=True) if scores else None

    # -- parts of a softmax

    def quotient(self, tensor: str) -> Activation | None:
        """Return the softmax that is an operator, or exp(x) / sum(exp(x))."""
        node = self.node(tensor)
        if node is None:
            return None
        if node.op_type == "Softmax":
            return Activation("softmax", node.input[0], attributes_of(node).get("axis"))
        for part, whole in self.fractions(node):
            exponential = self.node(part, "Exp")
            summed = self.reduced(whole, SUMS)
            # both are of the same exponential: another numerator would be another function
            if exponential and summed and self.source(summed[0]) == self.source(part):
                scores = self.unshifted(exponential.input[0], summed[1])
                return Activation("softmax", scores, summed[1], written_out=True)
        return None

    def difference(self, tensor: str) -> Activation | None:
        """Return the logarithm of a softmax that is an operator, or x - log(sum(exp(x)))."""
        node = self.node(tensor)
        if node is None:
            return None
        if node.op_type == "LogSoftmax":
            return Activation("log_softmax", node.input[0], attributes_of(node).get("axis"))
        if node.op_type != "Sub":
            return None
        scores = node.input[0]
        found = self.logarithm_of_sum(node.input[1])
        if found and self.source(found[0]) == self.source(scores):
            return Activation("log_softmax", self.unshifted(scores, found[1]), found[1], written_out=True)
        if (add := self.node(node.input[1], "Add")) is None:
            return None
        for greatest, rest in _both_orders(add):  # x - (max + log(sum(exp(x - max))))
            found = self.logarithm_of_sum(rest)
            axis = self.greatest_axis(greatest, scores)
            if found is None or axis is None or found[1] != axis:
                continue
            # without the shift inside of the sum the result would be less by the greatest score
            if found[0] != self.unshifted(found[0], axis) and self.are_shifted(found[0], scores):
                return Activation("log_softmax", scores, axis, written_out=True)
        return None

    def fractions(self, node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
        """Yield (numerator, denominator) of a quotient, or of a product with a reciprocal."""
        if node.op_type == "Div":
            yield node.input[0], node.input[1]
        elif node.op_type == "Mul":
            for one, other in _both_orders(node):
                if denominator := self.inverted(other):
                    yield one, denominator

    def reduced(self, tensor: str, operators: Sequence[str], *, regains_axis: bool = False) -> tuple[str, int] | None:
        """Return (tensor, axis) of a reduction along one axis; None if it is none.

        Its result must still have the axis, unless it regains it later.
        """
        node, has_axis = self.behind_axis(tensor)
        if node is None or node.op_type not in operators:
            return None
        attributes = attributes_of(node)
        if not attributes.get("keepdims", 1) and not has_axis and not regains_axis:
            return None
        # an attribute in earlier opsets, an operand since opset 13 or 18
        axes = attributes.get("axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            axes = self.numbers(node.input[1])
        return (node.input[0], int(axes[0])) if axes is not None and len(axes) == 1 else None

    def behind_axis(self, tensor: str) -> tuple[onnx.NodeProto | None, bool]:
        """Return the node in front of a node that adds an axis, and whether there is such a node."""
        node = self.node(tensor)
        # a sum without `keepdims` is divided by only after it has got its axis back
        if node is None or node.op_type not in ADDS_AXIS:
            return node, False
        return self.node(node.input[0]), True

    def greatest_axis(self, tensor: str, scores: str) -> int | None:
        """Return the axis if a tensor is the greatest of the scores along one; else None."""
        found = self.reduced(tensor, ("ReduceMax",))
        return found[1] if found and self.source(found[0]) == self.source(scores) else None

    def unshifted(self, tensor: str, axis: int) -> str:
        """Return the scores from which their greatest was subtracted, which changes no softmax; else the tensor."""
        node = self.node(tensor, "Sub")
        return node.input[0] if node and self.greatest_axis(node.input[1], node.input[0]) == axis else tensor

    def are_shifted(self, shifted: str, scores: str) -> bool:
        """Return whether a difference is that of these scores and something."""
        node = self.node(shifted, "Sub")
        return node is not None and self.source(node.input[0]) == self.source(scores)

    def logarithm_of_sum(self, tensor: str) -> tuple[str, int] | None:
        """Return (z, axis) of log(sum(exp(z))); None if a tensor is no such."""
        if found := self.reduced(tensor, ("ReduceLogSumExp",)):
            return found
        node, has_axis = self.behind_axis(tensor)
        if node is None or node.op_type != "Log":
            return None
        summed = self.reduced(node.input[0], SUMS, regains_axis=has_axis)
        exponential = self.node(summed[0], "Exp") if summed else None
        return (exponential.input[0], summed[1]) if exponential and summed else None

    # -- parts of a sigmoid

    def logistic(self, node: onnx.NodeProto) -> str:
        """Return x of 1 / (1 + exp(-x)) and of exp(x) / (1 + exp(x)); "" if a node computes neither."""
        # 1 / (1 + exp(-x)), then exp(x) / (1 + exp(x))
        denominator = self.inverted(node.output[0])
        if denominator and (exponential := self.beside_one(denominator, "Exp")):
            return self.negated(exponential.input[0])
        for part, whole in self.fractions(node):
            exponential = self.beside_one(whole, "Exp")
            if exponential and self.source(part) == exponential.output[0]:
                return str(exponential.input[0])
        return ""

    def half_of_tanh(self, node: onnx.NodeProto) -> str:
        """Return x of (1 + tanh(x / 2)) / 2 and of 1/2 + tanh(x / 2) / 2; "" if a node computes neither."""
        tanh = None
        if half := self.halved(node.output[0]):
            tanh = self.beside_one(half, "Tanh")
        elif node.op_type == "Add":
            terms = [self.halved(one) for one, other in _both_orders(node) if self.number(other) == 0.5]
            nodes = (self.node(name, "Tanh") for name in terms if name)
            tanh = next(filter(None, nodes), None)
        # x / 2 must be the argument: tanh(x) alone belongs to a sigmoid of 2 x
        return self.halved(tanh.input[0]) if tanh else ""

    def beside_one(self, tensor: str, operator: str) -> onnx.NodeProto | None:
        """Return the node of an operator to whose result 1 is added; None if a tensor is no such sum."""
        add = self.node(tensor, "Add")
        if add is None:
            return None
        found = [self.node(one, operator) for one, other in _both_orders(add) if self.number(other) == 1]
        return next(filter(None, found), None)

    # -- arithmetic with a stored number

    def inverted(self, tensor: str) -> str:
        """Return x of 1 / x; "" if a tensor is no such."""
        node = self.node(tensor)
        if node is None:
            return ""
        if node.op_type == "Reciprocal" or (node.op_type == "Pow" and self.number(node.input[1]) == -1):
            return str(node.input[0])
        return str(node.input[1]) if node.op_type == "Div" and self.number(node.input[0]) == 1 else ""

    def negated(self, tensor: str) -> str:
        """Return x of -x; "" if a tensor is no such."""
        node = self.node(tensor)
        if node is None:
            return ""
        if node.op_type == "Neg":
            return str(node.input[0])
        if node.op_type == "Sub" and self.number(node.input[0]) == 0:
            return str(node.input[1])
        return self._times(node, -1.0)

    def halved(self, tensor: str) -> str:
        """Return x of x / 2; "" if a tensor is no such."""
        node = self.node(tensor)
        return self._times(node, 0.5) if node else ""

    def _times(self, node: onnx.NodeProto, factor: float) -> str:
        if node.op_type == "Mul":
            return next((one for one, other in _both_orders(node) if self.number(other) == factor), "")
        return str(node.input[0]) if node.op_type == "Div" and self.number(node.input[1]) == 1 / factor else ""

    # -- tensors

    def source(self, tensor: str) -> str:
        """Return the tensor in front of Identity, Dropout and casts between floats."""
        seen = set[str]()  # a damaged file may have a circle
        while tensor not in seen and (node := self.index.makers.get(tensor)) is not None and _keeps_values(node):
            seen.add(tensor)
            tensor = node.input[0]
        return tensor

    def node(self, tensor: str, operator: str = "") -> onnx.NodeProto | None:
        """Return ONNX's own node that computes a tensor; None if there is none, or another operator's than asked."""
        node = self.index.makers.get(self.source(tensor))
        is_ours = node is not None and domain_of(node) == "" and operator in ("", node.op_type)
        return node if is_ours else None

    def number(self, tensor: str) -> float | None:
        """Return the number that all elements of a stored tensor have; None if it is not stored, or they differ."""
        values = self.numbers(tensor)
        return values[0] if values and values.count(values[0]) == len(values) else None

    def numbers(self, tensor: str) -> list[float] | None:
        """Return the elements of a small stored tensor; None if a tensor is no such."""
        name = self.source(tensor)
        stored = self.index.stored.get(name)
        if stored is not None and math.prod(stored.dims) <= SMALL and not stored.external_data:
            return [float(value) for value in stored_array(stored).astype(np.float64).flat]
        maker = self.index.makers.get(name)
        if maker is None or maker.op_type != "Constant":
            return None
        # a Constant whose value is a tensor is among `stored`; the others write numbers as attributes
        attributes = attributes_of(maker)
        single = next((attributes[key] for key in ("value_float", "value_int") if key in attributes), None)
        several = next((attributes[key] for key in ("value_floats", "value_ints") if key in attributes), None)
        if single is not None:
            return [float(single)]
        return several and [float(value) for value in several]


def _keeps_values(node: onnx.NodeProto) -> bool:
    is_cast = node.op_type == "Cast" and attributes_of(node).get("to") in FLOAT_TYPES
    return domain_of(node) == "" and (is_cast or node.op_type in ("Identity", "Dropout"))


def _both_orders(node: onnx.NodeProto) -> tuple[tuple[str, str], tuple[str, str]]:
    one, other = node.input
    return (one, other), (other, one)
