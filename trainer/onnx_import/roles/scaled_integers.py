"""Follow stored integers through Cast and Mul: quantized weights of files that have no DequantizeLinear.

    E (int8) --- Gather(ids) --- Cast(float) --- Mul(s)                 s: one number, or one for each column
    E (int8) --- Gather(ids) --- Cast(float) --- Mul(Gather(s, ids))    s: one for each row
    W (int8) --- Cast(float) --- Sub(zero) --- Mul(s) --- MatMul        zero: floats, or Cast(integers)
    W (int8) [rows, blocks, n] --- Cast --- Mul(s [rows, blocks, 1])    s: one for each block

Scales broadcast, so what they belong to depends on where each axis of the stored tensor went (`Axes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import torch

from onward.trainer.onnx_graph.files.element_types import DTYPES
from onward.trainer.onnx_graph.files.index import attributes_of, inner_graphs, names_read
from onward.trainer.onnx_import.roles.role_tables import MOVES
from onward.trainer.onnx_import.scaled_values import ScaleLayout

NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
"""Types of integers that are codes of numbers where they become floats; wider ones are positions and lengths."""


@dataclass(frozen=True)
class Axes:
    """Where the axes of a stored tensor are in a value made of its elements."""

    last: tuple[int, ...]
    """The axes of the stored tensor that the last axes of the value are."""
    complete: bool = True
    """Whether the value has no further axes."""
    rows: str = ""
    """The indices by which rows were gathered, which are the further axes."""

    def after(self, node: onnx.NodeProto) -> Axes:
        """Return the axes of the first output of an operator in MOVES that reads the value as its first operand."""
        if node.op_type == "Identity":
            return self
        if node.op_type == "Transpose" and self.complete:
            order = attributes_of(node).get("perm") or range(len(self.last))[::-1]
            return replace(self, last=tuple(self.last[place] for place in order))
        gathers = node.op_type == "Gather" and attributes_of(node).get("axis", 0) == 0
        if gathers and self.complete and self.last[:1] == (0,):
            return Axes(self.last[1:], complete=False, rows=node.input[1])
        return Axes((), complete=False)


def whole(tensor: torch.Tensor) -> Axes:
    """Return the axes of a stored tensor itself."""
    return Axes(tuple(range(tensor.ndim)))


@dataclass(frozen=True)
class Use:
    """How one operand of one node is dequantized."""

    scales: tuple[str, ...]
    """Names of the tensors whose product is the scale."""
    zero: str
    """Name of the zero point, "" if it is 0."""
    axis: int
    """The axis along which scales differ, as a non-negative number."""
    block: int = 0
    """The number of elements that share a scale, 0: one for each index."""


class Readers:
    """The nodes of the main graph that read and that compute each value."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.places: dict[str, list[tuple[int, int]]] = {}
        """Value -> (place of the node in the graph, position of the operand) of all that read it."""
        self.makers: dict[str, int] = {}
        """Value -> place of the node that computes it."""
        for place, node in enumerate(self.nodes):
            for position, name in enumerate(node.input):
                self.places.setdefault(name, []).append((place, position))
            self.makers |= dict.fromkeys(filter(None, node.output), place)
        self.unknown = {value.name for value in graph.output}
        """Values that are returned, or read by inner graphs."""
        for body in inner_graphs(graph.node):
            for node in body.node:
                self.unknown.update(names_read(node))

    def of(self, value: str) -> Iterator[tuple[int, onnx.NodeProto, int]]:
        """Yield (place, node, position of the operand) of all that read a value."""
        for place, position in self.places.get(value, ()):
            yield place, self.nodes[place], position

    def maker(self, value: str) -> onnx.NodeProto | None:
        """Return the node that computes a value."""
        place = self.makers.get(value)
        return None if place is None else self.nodes[place]


def makes_floats(node: onnx.NodeProto) -> bool:
    """Return whether a node converts to a floating-point type in which one computes."""
    if node.op_type != "Cast":
        return False
    dtype = DTYPES.get(attributes_of(node).get("to", 0))
    return dtype is not None and dtype.is_floating_point and dtype.itemsize > 1


def is_code(tensor: torch.Tensor | None) -> bool:
    """Return whether a stored tensor may hold integers that stand for numbers; zeros and ones alone are a mask."""
    if tensor is None or tensor.dtype not in NARROW or not tensor.numel():
        return False
    values = tensor.numpy()  # torch has no minimum of uint16
    return bool(values.min() < 0 or values.max() > 1)


@dataclass(frozen=True)
class ScaledIntegers:
    """Finds how integers that were converted to floats are scaled."""

    readers: Readers
    stored: Mapping[str, torch.Tensor]
    scaling: set[int] = field(default_factory=set)
    """Places of the nodes that read the scales and zero points that were found."""

    def only_scales(self, name: str) -> bool:
        """Return whether nothing but nodes in `scaling` reads a stored tensor."""
        return name not in self.readers.unknown and all(place in self.scaling for place, _, _ in self.readers.of(name))

    def uses(
        self, value: str, weight: torch.Tensor, axes: Axes, zero: str = "", seen: int = -1
    ) -> Iterator[Use | None]:
        """Yield how each reader of a converted value scales it, None for one that does not.

        zero: the value that was subtracted, by the node at the place `seen`.
        """
        if value in self.readers.unknown:
            yield None
        for place, node, position in self.readers.of(value):
            moves = node.op_type in MOVES and position == 0 and len(node.output) == 1
            # a zero point that was subtracted has the axes of before
            if moves and not zero:
                yield from self.uses(node.output[0], weight, axes.after(node))
            elif node.op_type == "Sub" and position == 0 and not zero:
                yield from self.uses(node.output[0], weight, axes, node.input[1], place)
            elif node.op_type == "Mul":
                yield self._use(place, node.input[1 - position], weight, axes, (zero, seen))
            else:
                yield None

    def _use(self, place: int, scale: str, weight: torch.Tensor, axes: Axes, subtracted: tuple[str, int]) -> Use | None:
        zero, seen = subtracted
        factor = self._operand(scale, weight, axes)
        shift = self._operand(zero, weight, axes) if zero else None
        if factor is None or (zero and shift is None):
            return None
        name, layout, between = factor
        # noted only where the whole chain fits: a scale that another node reads, too, is not only a scale
        nodes = {place, *between}
        first = ""
        if shift is not None:
            first, of_zero, between = shift
            nodes |= {seen, *between}
            if None not in (layout, of_zero) and layout != of_zero:
                return None
            # a single number goes with every layout
            layout = of_zero if layout is None else layout
            # a fraction has no integer that stands for 0, and the rounding would not be that of the file
            if not bool((self.stored[first].float() == self.stored[first].float().round()).all()):
                return None
        self.scaling.update(nodes)
        axis, block = layout or (0, 0)
        return Use((name,), first, axis, block)

    def _operand(
        self, value: str, weight: torch.Tensor, axes: Axes
    ) -> tuple[str, ScaleLayout | None, tuple[int, ...]] | None:
        """Return (name, layout, places of the nodes between) of the stored tensor that an operand is.

        The layout is None for a single number. Returns None for an operand that is computed, or of another shape.
        """
        between: list[int] = []
        gathered = ""
        while value not in self.stored:
            place = self.readers.makers.get(value, -1)
            node = self.readers.nodes[place] if place >= 0 else onnx.NodeProto()
            is_gather = node.op_type == "Gather" and not gathered
            # only by the indices that selected rows of the weight does each row meet its own scale
            if is_gather and axes.rows and node.input[1] == axes.rows:
                gathered = node.input[1]
            elif not makes_floats(node):
                return None
            between.append(place)
            value = node.input[0]
        tensor = self.stored[value]
        if gathered:
            one_a_row = tensor.ndim == weight.ndim and tensor.numel() == tensor.shape[0] == weight.shape[0]
            return (value, (0, 0), tuple(between)) if one_a_row else None
        if tensor.numel() == 1:
            return value, None, tuple(between)
        layout = _layout(tensor.shape, weight.shape, axes)
        return None if layout is None else (value, layout, tuple(between))


def _layout(scale: Sequence[int], weight: Sequence[int], axes: Axes) -> ScaleLayout | None:
    """Return along which axis of the weight several scales differ, or which axis is divided into blocks."""
    differing = []
    # from the last axis, by which a scale broadcasts with the value
    for place, length in enumerate(reversed(scale), start=1):
        if length == 1:
            continue
        if place > len(axes.last) or weight[axes.last[-place]] != length:
            return None
        differing.append(axes.last[-place])
    if len(differing) == 1:
        return differing[0], 0
    # several axes differ: blocks, if all the elements along one further axis share a scale
    long = [axis for axis, length in enumerate(weight) if length > 1]
    shared = [axis for axis in long if axis not in differing]
    in_place = axes == Axes(tuple(range(len(weight)))) and len(scale) == len(weight)
    if not in_place or len(shared) != 1:
        return None
    return shared[0], weight[shared[0]]
