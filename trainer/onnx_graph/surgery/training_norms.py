"""Decide which BatchNormalization nodes in training form have running statistics, and which ones have none.

A node in training form normalises by the mean and the variance of its own input. What it stores beside them is

    running statistics    of many batches, if each channel of the input is one feature of all rows of a batch. Inference
                          normalises by them, so train() and eval() differ, and the exported file uses the stored ones.
    a placeholder         for every other input. The node is a normalisation written with this operator, and it computes
                          the same in training, in evaluation and in the exported file: by its own input.

                                                    the rows of the batch are    the node has
    x [N, C, H, W]                                  on axis 0                    running statistics
    Reshape(x, [1, N*C, H, W])                      in the channels              a placeholder   instance normalisation
    Reshape(x, [N/4, 4*C, H, W])                    divided among two axes       a placeholder   ghost batches
    Transpose(x [N, C])                             the channels                 a placeholder   layer normalisation
    Reshape(weight)                                 nowhere                      a placeholder   weight standardisation
    any, momentum = 1 (nothing of a batch is kept)                               a placeholder

Everything that depends on this reads it here: the importer (`mark_batch_statistics`), the inference form of a file
(strip_training.py) and `onward doctor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import onnx
from onnx import helper

from onward.trainer.onnx_graph.files.index import (
    attributes_of,
    dims_of,
    graphs_of,
    known_types,
    nodes_inside,
    opsets_of,
    subgraphs,
)
from onward.trainer.onnx_graph.files.model_files import stored_array
from onward.trainer.onnx_graph.files.operators import functions_of, is_operator

BATCH_STATISTICS = "batch_statistics"
"""The attribute by which `mark_batch_statistics` marks nodes, in copies that are never written."""
BY_ROW = 2
"""Its value for `TrainingNorm.by_row`; 1 for the others."""

Scope = tuple[str, ...]
"""The function of the model that a node is in, () for the graph."""
Dims = list[int | None]

BROADCASTS = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Where", "Min", "Max", "Sum", "Mean", "Mod"})
WITHOUT_ROWS = frozenset({"Shape", "Size", "ConstantOfShape", "Range", "EyeLike"})
"""Operators whose results hold none of the values of their operands."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of the batch are in a value that is computed from the inputs of the graph."""

    axis: int | None = 0
    """The axis that holds them; None = they are divided among several."""
    number: int | None = None
    """How many there are, as far as the file fixes it."""


@dataclass(frozen=True)
class TrainingNorm:
    """A BatchNormalization in training form."""

    scope: Scope
    result: str
    """The name of its first output."""
    opset: int
    """The opset that it is read in."""
    placeholder: str
    """Why its stored statistics are not running ones, as a clause; "" if they are."""
    by_row: bool
    """Whether its scale and bias hold a number for each place in the batch."""


def training_norms(model: onnx.ModelProto) -> list[TrainingNorm]:
    """Return the BatchNormalization nodes in training form, those in inner graphs and functions included.

    A node of a function has running statistics only if it has them in every call.
    """
    if not any(_in_training_form(node, version) for node, version in _norms_of(model)):
        return []  # the usual case, without inferring shapes
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = {name: dims for name, value in known_types(model).items() if (dims := dims_of(value)) is not None}
    follower = _RowFollower(functions_of(model), shapes, stored)
    # each input has its rows on axis 0, from where they are followed
    for value in model.graph.input:
        if value.name not in stored:
            dims = dims_of(value)
            if dims != []:  # a scalar is the same for all rows
                follower.rows[value.name] = Rows(0, dims[0] if dims else None)
    follower.visit(model.graph.node, opsets_of(model), ())
    return list(follower.found.values())


def mark_batch_statistics(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, whose functions are inlined, with the attribute BATCH_STATISTICS at nodes without running ones.

    A copy if there is any such node.
    """
    norms = {norm.result: norm for norm in training_norms(model) if norm.placeholder}
    if not norms:
        return model
    copy = deepcopy(model)
    for graph in graphs_of(copy.graph):
        for node in graph.node:
            if is_operator(node, "BatchNormalization") and (norm := norms.get(node.output[0])) is not None:
                node.attribute.append(helper.make_attribute(BATCH_STATISTICS, BY_ROW if norm.by_row else 1))
    return copy


def _norms_of(model: onnx.ModelProto) -> Iterable[tuple[onnx.NodeProto, int]]:
    """Yield every BatchNormalization with the opset that it is read in."""
    for body in (model.graph, *model.functions):
        opsets = opsets_of(model) | (opsets_of(body) if isinstance(body, onnx.FunctionProto) else {})
        yield from (
            (node, opsets.get("", 1)) for node in nodes_inside(body.node) if is_operator(node, "BatchNormalization")
        )


def _in_training_form(node: onnx.NodeProto, opset: int) -> bool:
    """Return whether a BatchNormalization normalises by its own input, which each version writes in its own way."""
    attributes = attributes_of(node)
    if opset >= 14:
        return bool(attributes.get("training_mode", 0))
    if opset >= 7:
        return any(node.output[1:])
    return not attributes.get("is_test", 0)


@dataclass
class _RowFollower:
    """Follows the rows of the batch through the nodes in their order."""

    functions: Mapping[tuple[str, str, str], onnx.FunctionProto]
    dims: Mapping[str, Dims]
    """The shapes of the values of the main graph, as far as they are known."""
    stored: dict[str, onnx.TensorProto]
    rows: dict[str, Rows] = field(default_factory=dict)
    """Value -> its rows; a value that does not descend from an input is not there."""
    found: dict[tuple[Scope, str], TrainingNorm] = field(default_factory=dict)
    """The norms in training form, by their scope and first output."""

    def visit(self, nodes: Iterable[onnx.NodeProto], opsets: Mapping[str, int], scope: Scope) -> None:
        for node in nodes:
            called = (node.domain, node.op_type, node.overload)
            if called in self.functions:
                self._visit_call(node, self.functions[called], opsets)
            elif any(subgraphs(node)):
                self._visit_bodies(node, opsets, scope)
            else:
                self._visit_node(node, opsets, scope)

    def _visit_node(self, node: onnx.NodeProto, opsets: Mapping[str, int], scope: Scope) -> None:
        opset = opsets.get("", 1)
        if is_operator(node, "BatchNormalization") and _in_training_form(node, opset):
            rows = self.rows.get(node.input[0])
            by_row = rows is not None and rows.axis in (1, None)
            self._add(TrainingNorm(scope, node.output[0], opset, _why_placeholder(node, rows), by_row))
        if node.op_type == "Constant" and "value" in (attributes := attributes_of(node)):
            self.stored[node.output[0]] = attributes["value"]
        moved = self._moved(node)
        results = (
            node.output[:1] if is_operator(node, "BatchNormalization") else node.output
        )  # its statistics are those of no row
        if moved is not None:
            self.rows.update(dict.fromkeys(filter(None, results), moved))

    def _add(self, norm: TrainingNorm) -> None:
        # of the calls of a function one that makes the norm a placeholder decides
        known = self.found.get((norm.scope, norm.result))
        if known is None or not known.placeholder:
            self.found[norm.scope, norm.result] = norm

    # -- bodies

    def _visit_call(self, node: onnx.NodeProto, body: onnx.FunctionProto, opsets: Mapping[str, int]) -> None:
        outer = self.rows
        # the body sees its formal inputs alone, under their names; operands at the end may be left out
        operands = zip(body.input, node.input, strict=False)
        self.rows = {formal: outer[actual] for formal, actual in operands if actual in outer}
        self.visit(body.node, {**opsets, **opsets_of(body)}, (body.domain, body.name, body.overload))
        results = [self.rows.get(name) for name in body.output]
        self.rows = outer
        for name, rows in zip(node.output, results, strict=False):
            if rows is not None:
                self.rows[name] = rows

    def _visit_bodies(self, node: onnx.NodeProto, opsets: Mapping[str, int], scope: Scope) -> None:
        """Follow the rows into If, Loop and Scan, and from the results of their bodies to those of the node."""
        bodies = list(subgraphs(node))
        results = dict[int, Rows]()
        for body in bodies:
            outer = dict(self.rows)
            operands: Sequence[str] = node.input
            if node.op_type == "Loop":
                operands = ["", *node.input[1:]]  # the iteration number, the condition, the state
            num_scanned = attributes_of(node).get("num_scan_inputs", 0)
            for slot, (value, name) in enumerate(zip(body.input, operands, strict=False)):
                if (rows := self.rows.get(name)) is None:
                    continue
                if rows.axis and slot >= len(operands) - num_scanned:  # the body is given slices of the first axis
                    rows = replace(rows, axis=rows.axis - 1)
                self.rows[value.name] = rows
            self.visit(body.node, opsets, scope)
            # the first output of a Loop's body is the condition, which is no result of the node
            own = body.output[1:] if node.op_type == "Loop" else body.output
            for position, value in enumerate(own):
                # of several bodies, as of an If, the first one that has rows decides
                if (rows := self.rows.get(value.name)) is not None:
                    results.setdefault(position, rows)
            self.rows = outer
        self.rows.update((name, results[position]) for position, name in enumerate(node.output) if position in results)

    # -- nodes

    def _moved(self, node: onnx.NodeProto) -> Rows | None:
        """Return the rows of the node's results; None if they hold none."""
        operands = [self.rows.get(name) for name in node.input]
        # the first operand that has rows stands for the others
        slot = next((slot for slot, rows in enumerate(operands) if rows is not None), None)
        if slot is None or node.op_type in WITHOUT_ROWS:
            return None
        rows = operands[slot]
        name = node.input[slot]
        assert rows is not None
        # only a Reshape can bring divided rows together again
        if rows.axis is None and node.op_type != "Reshape":
            return rows
        if node.op_type in ("Reshape", "Flatten"):
            return self._reshaped(node, rows)
        if node.op_type in ("Gather", "Transpose", "Unsqueeze", "Squeeze") or node.op_type.startswith("Reduce"):
            return self._rearranged(node, rows, slot)
        if node.op_type in BROADCASTS:
            return self._broadcast(node, rows, name)
        return rows  # layers, and whatever else works on each row

    def _reshaped(self, node: onnx.NodeProto, rows: Rows) -> Rows:
        before = self.dims.get(node.input[0])
        after = self.dims.get(node.output[0])
        if after is None and node.op_type == "Reshape":
            # an attribute before opset 5; -1 and 0 stand for lengths that are not written
            lengths = self._constant(node.input[1]) if len(node.input) > 1 else attributes_of(node).get("shape")
            if lengths is not None:
                after = [int(length) if length > 0 else None for length in lengths]
        return rows if after is None else replace(rows, axis=_axis_after(rows, before, after))

    def _rearranged(self, node: onnx.NodeProto, rows: Rows, slot: int) -> Rows | None:
        """Return the rows after axes were permuted, added or removed."""
        assert rows.axis is not None
        attributes = attributes_of(node)
        rank = len(self.dims.get(node.input[0], ()))
        if node.op_type == "Transpose":
            order = list(attributes.get("perm") or reversed(range(rank)))
            return replace(rows, axis=order.index(rows.axis) if rows.axis in order else None)
        if node.op_type == "Gather":
            return self._gathered(node, rows, slot)
        # an attribute before opset 13 (of reductions 18), an operand since
        axes = attributes.get("axes") or (self._constant(node.input[1]) if len(node.input) > 1 else None)
        if axes is None:
            if not node.op_type.startswith("Reduce") or (len(node.input) > 1 and node.input[1]):
                return rows
            return rows if attributes.get("noop_with_empty_axes") else None  # all axes, that of the rows included
        # negative axes count from the end: of the result for Unsqueeze, of the operand for the others
        final = len(self.dims.get(node.output[0], ())) or rank + len(axes)
        chosen = {int(axis) % (final if node.op_type == "Unsqueeze" else max(rank, 1)) for axis in axes}
        if node.op_type == "Unsqueeze":
            # the axes of the operand take the places that the new ones leave, in their order
            free = [axis for axis in range(final) if axis not in chosen]
            return replace(rows, axis=free[rows.axis] if rows.axis < len(free) else None)
        if rows.axis in chosen:
            return None if node.op_type.startswith("Reduce") else rows
        if node.op_type.startswith("Reduce") and attributes.get("keepdims", 1):
            return rows
        return replace(rows, axis=rows.axis - sum(axis < rows.axis for axis in chosen))

    def _gathered(self, node: onnx.NodeProto, rows: Rows, slot: int) -> Rows | None:
        """Return the rows of what indices select: those of the indices, or of the data around the indexed axis."""
        assert rows.axis is not None
        axis = attributes_of(node).get("axis", 0)
        # the axes of the indices stand in place of the indexed axis
        if slot == 1:
            return replace(rows, axis=rows.axis + max(axis, 0))
        axis %= max(len(self.dims.get(node.input[0], ())), 1)
        added = len(self.dims[node.input[1]]) - 1 if node.input[1] in self.dims else 0
        return replace(rows, axis=rows.axis + added) if axis < rows.axis else rows

    def _broadcast(self, node: onnx.NodeProto, rows: Rows, name: str) -> Rows:
        """Return the rows after axes were put in front to fit the other operands."""
        assert rows.axis is not None
        before = self.dims.get(name)
        after = self.dims.get(node.output[0])
        return rows if before is None or after is None else replace(rows, axis=rows.axis + len(after) - len(before))

    def _constant(self, name: str) -> Any:
        """Return the values of a small initializer; None for any other value."""
        tensor = self.stored.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return stored_array(tensor).reshape(-1).tolist()


def _why_placeholder(node: onnx.NodeProto, rows: Rows | None) -> str:
    """Return why the stored statistics of a norm are not running ones; rows: those of its input."""
    if rows is None:
        return "its input is computed from stored tensors alone"
    if rows.axis is None:
        return "the rows of the batch are divided among several axes of its input"
    if rows.axis == 1:
        return "the rows of the batch are among the channels of its input"
    if attributes_of(node).get("momentum", 0.9) == 1:
        return "with momentum = 1 it keeps nothing of a batch"
    return ""


def _axis_after(rows: Rows, before: Dims | None, after: Dims) -> int | None:
    """Return the axis that holds the rows after a reshape; None if they are divided among several.

    before, after: the shapes, None for lengths that are not known (before: or the whole shape).
    """
    if rows.axis is None:
        # a first axis of their number holds them together, as behind a norm of ghost batches
        return 0 if after and after[0] in (None, rows.number) else None
    if rows.number is None:
        return _axis_of_any_number(rows.axis, before, after)
    keeps_shape = before == after and len(after) > 1 and after[0] == 1
    if rows.number == 1 and rows.axis < 2 and keeps_shape:
        # in a file of one row, a Reshape to the shape that the value has folds the row into the channels, or unfolds it
        return 1 - rows.axis
    leading = before[: rows.axis] if before is not None else [None] * rows.axis
    if None in leading:
        return rows.axis
    # a row's number is counted in steps of all that is behind it: from `in_front` to `in_front * number` axes away
    in_front = math.prod(length or 0 for length in leading)
    seen = 1
    for axis, length in enumerate(after):
        if seen <= in_front and (length is None or in_front * rows.number <= seen * length):
            return axis
        if length is None:
            return None
        seen *= length
    return None


def _axis_of_any_number(axis: int, before: Dims | None, after: Dims) -> int | None:
    """Return the same for a number of rows that the file leaves open: an axis of unknown length."""
    size_before, size_after = (_product(dims[1:]) if dims else None for dims in (before, after))
    holds_more = size_before and size_after and size_after > size_before
    if axis == 0 and after[:1] == [None] and holds_more:
        return None  # one entry of the first axis holds several rows
    free = [position for position, length in enumerate(after) if length is None]
    return axis if axis in free else next(iter(free), None)


def _product(dims: Dims) -> int | None:
    if None in dims:
        return None
    return math.prod(length or 0 for length in dims)
