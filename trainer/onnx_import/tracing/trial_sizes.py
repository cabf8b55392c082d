"""The sizes of dynamic dimensions at which an import traces the graph (see tracing.py for why there are two)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper

from onward.trainer.onnx_graph.files.external_ranges import is_external
from onward.trainer.onnx_graph.files.index import attributes_of, inputs_of, length_of
from onward.trainer.onnx_graph.files.stored_protos import stored_protos

Table: TypeAlias = tuple[tuple[int, int], ...]
Lengths = Mapping[tuple[str, int], tuple[int, int]]
"""(input name, dimension) -> the two lengths at which it is traced; equal ones for a static dimension."""

# Row 0 of each table is for the batch, the others for further dynamic dimensions. Two unrelated dimensions must not
# agree by chance, neither in themselves nor in the results of shape arithmetic on them.
SMALL: Table = ((3, 5), (7, 11), (13, 19), (17, 29), (23, 41), (31, 47))
"""No two pairs have the same difference or ratio."""
LARGE: Table = ((3, 5), (224, 320), (256, 416), (288, 512), (352, 640), (384, 736))
"""For images of dynamic size, which a network halves several times."""
MIXED: Table = ((6, 17), (40, 171), (66, 229), (98, 309), (130, 357), (162, 425))
"""One even and one odd length whose difference is prime, so that remainders and numbers of blocks differ too."""
SHORT: Table = ((3, 5), (7, 11), (6, 9), (8, 13), (4, 10), (2, 12))
"""For lookup tables with few rows, such as position embeddings of short sequences."""

MOST_HALVED = 4
"""A graph that divides its lengths by more gets lengths that are multiples of it: of SMALL little would be left."""
FACTORS = {"Slice": 4, "Resize": 2, "Upsample": 1}
"""Operator -> the operand that holds steps, or scales."""
MOST = 1 << 20
"""Longer lengths are not tried; a graph that asks for them is nonsense."""
WINDOWS = {
    **{"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3},
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool", "QLinearAveragePool"), 0),
}
"""Operator -> the operand whose shape has that of the window, if the attribute `kernel_shape` does not; 0: none."""


def declared_batch(graph: onnx.GraphProto) -> int:
    """Return the batch size that all inputs declare as their first dimension; 0 if it is dynamic or they differ.

    Exporters often fix the batch to that of the example input.
    """
    shapes = [value.type.tensor_type.shape.dim for value in inputs_of(graph)]
    leading = {length_of(dims[0]) for dims in shapes if dims}
    return leading.pop() or 0 if len(leading) == 1 else 0


def trial_sizes(graph: onnx.GraphProto, *, widen: bool | None = None) -> Iterable[tuple[Lengths, int | None]]:
    """Yield the sizes to try, one after the other, until an import succeeds without assumptions.

    Beside the lengths stands the batch size that the file declares when it is to be treated as dynamic. widen: always
    treat a declared batch so, or never; None: so first.
    """
    inputs = inputs_of(graph)
    batch = declared_batch(graph)
    # SMALL suits most models; the others are for lengths that a network halves, divides or looks up
    tables = [SMALL, LARGE, MIXED, SHORT]
    # made to measure where the graph divides its lengths so often that those of SMALL would end at 1 or 0
    need = lengths_needed(graph)
    if need.divisor > MOST_HALVED or need.shortest > SMALL[1][0]:
        tables = [need.scale(SMALL), need.scale(MIXED), *tables]
    batches: list[int | None] = [None]
    if batch and widen:
        batches = [batch]
    elif batch and widen is None:
        # a dynamic batch first: a model traced at any batch size is more useful than one of fixed size
        batches = [batch, None]
    for free in batches:
        for table in tables:
            yield _lengths(inputs, table, free_batch=free is not None), free
    if batch and widen:
        return
    # last, since a length of 0 is hardly ever meant
    if any(_is_empty(dim) for value in inputs for dim in value.type.tensor_type.shape.dim):
        yield _lengths(inputs, SMALL, free_batch=False, empty=True), None


@dataclass(frozen=True)
class Need:
    """What the windows and strides of a graph ask of the lengths of its inputs."""

    divisor: int = 1
    """The product of the strides from an input on: 32 behind five layers that halve."""
    shortest: int = 1
    """The length that all windows fit into."""

    def scale(self, table: Table) -> Table:
        """Return a table of lengths whose quotients are those of a given table, or a little more."""
        margin = -(-self.shortest // self.divisor)
        others = [((first + margin) * self.divisor, (second + margin) * self.divisor) for first, second in table[1:]]
        return (table[0], *others)


def lengths_needed(graph: onnx.GraphProto) -> Need:
    """Return what the convolutions, poolings and slices with a step of a graph need, the greatest of all its axes."""
    stored = dict(stored_protos(graph))
    needs: dict[str, Need] = {}
    for node in graph.node:
        operands = [needs[name] for name in node.input if name in needs]
        before = _greatest(operands)
        window, stride = _window(node, stored)
        after = Need(min(MOST, before.divisor * stride), min(MOST, max(before.shortest, before.divisor * window)))
        needs |= dict.fromkeys(filter(None, node.output), after)
    return _greatest(needs.values())


def _greatest(needs: Collection[Need]) -> Need:
    divisors = (need.divisor for need in needs)
    return Need(max(divisors, default=1), max((need.shortest for need in needs), default=1))


def _window(node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]) -> tuple[int, int]:
    """Return (length of the longest window of an operator without its padding, what it divides lengths by)."""
    attributes = attributes_of(node)
    if node.op_type in FACTORS:
        operand = stored.get(node.input[FACTORS[node.op_type]]) if len(node.input) > FACTORS[node.op_type] else None
        if operand is None or is_external(operand):
            return 1, 1
        factors = abs(numpy_helper.to_array(operand).astype(np.float64))
        # a step divides a length, a scale below 1 does too
        by = factors if node.op_type == "Slice" else 1 / factors[factors > 0]
        return 1, round(min(MOST, by.max(initial=1)))
    # it needs whole blocks, and divides lengths by their side
    if node.op_type == "SpaceToDepth":
        return int(attributes["blocksize"]), int(attributes["blocksize"])
    if node.op_type not in WINDOWS:
        return 1, 1
    weight = stored.get(node.input[WINDOWS[node.op_type]]) if WINDOWS[node.op_type] else None
    # the attribute is optional: the weight has the lengths of the kernel, too
    kernel = attributes.get("kernel_shape") or (list(weight.dims[2:]) if weight is not None else [1])
    dilations = attributes.get("dilations") or [1] * len(kernel)
    pads = attributes.get("pads") or [0] * 2 * len(kernel)
    is_padded = attributes.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER")
    sides = zip(kernel, dilations, pads, pads[len(kernel) :], strict=False)
    # without its padding, which makes a shorter input fit
    spans = [(length - 1) * dilation + 1 - before - after for length, dilation, before, after in sides]
    # auto_pad SAME makes any length fit; a stride divides it all the same
    return 1 if is_padded else max([1, *spans]), max([1, *attributes.get("strides", ())])


def _is_empty(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Return whether a length of 0 is declared; some exporters write it for an unknown length."""
    return dim.HasField("dim_value") and dim.dim_value == 0


def _lengths(inputs: Sequence[onnx.ValueInfoProto], table: Table, *, free_batch: bool, empty: bool = False) -> Lengths:
    """Assign a row of the table to each symbol (`dim_param`) and each unnamed dynamic dimension.

    free_batch: treat a declared leading dimension as dynamic. empty: take a declared length of 0 literally.
    """
    rows: dict[str, int] = {"": 0}  # symbol -> row; the batch is row 0, whatever its symbol
    lengths: dict[tuple[str, int], tuple[int, int]] = {}
    for value in inputs:
        for position, dim in enumerate(value.type.tensor_type.shape.dim):
            fixed = dim.dim_value > 0 or (empty and _is_empty(dim))
            if fixed and not (free_batch and position == 0):
                lengths[value.name, position] = (dim.dim_value, dim.dim_value)
                continue
            # dimensions without a name are different lengths, but the first one is the batch
            unnamed = "" if position == 0 else f"{value.name}[{position}]"
            if position == 0 and dim.dim_param:
                rows.setdefault(dim.dim_param, 0)
            # equal symbols are one length, in all inputs; each new one takes the next row
            number = rows.setdefault(dim.dim_param or unnamed, len(set(rows.values())))
            first, second = table[number % len(table)]
            further = number // len(table)  # more symbols than rows: use the table again, shifted
            lengths[value.name, position] = (first + 50 * further, second + 90 * further)
    return lengths
