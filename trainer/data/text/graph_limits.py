"""Find what a graph says about its text inputs: rows of the embeddings that they index, and of the positions.

    input_ids [B, L] --(Cast, Identity, ...)--> Gather(axis 0) <-- initializer [V, D]        V ids fit
    Range, or a constant 0, 1, 2, ... --------> Gather(axis 0) <-- initializer [P, D]        P positions fit
    Range --> Add(k) --> Unsqueeze -----------> Gather(axis 0) <-- initializer [P, D]        P - k: GPT-2 (k = 0)
    CumSum(mask) --> Mul(mask) --> Add(k) ----> Gather(axis 0) <-- initializer [P, D]        P - 1 - k: RoBERTa, OPT

Only what the graph shows: an embedding that is computed, or positions that are computed from the ids, are not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from types import MappingProxyType

import numpy as np
import onnx
import onnx.numpy_helper

PASSES_VALUES = {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Transpose", "Expand"}
"""Operators whose result has the values of their first input."""
INTEGERS = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
LEAST_WIDTH = 2
"""Columns of an embedding, and positions, at least."""


def embedding_rows(graph: onnx.GraphProto, name: str) -> tuple[int, str] | None:
    """Return (rows, name) of the smallest embedding that an input indexes, or None if the graph shows none.

    Where a constant is added to the index, rows are those that are left behind it.
    """
    return _smallest_table(graph, {name: 0})


def position_rows(graph: onnx.GraphProto, *, with_masks: bool = True) -> tuple[int, str] | None:
    """Return (rows, name) of the smallest embedding that is indexed by 0, 1, 2, ..., or None.

    with_masks: also where the positions are the running sum of a mask, so that they count tokens, not places.
    """
    starts = {tensor.name: 0 for tensor in _tensors(graph) if _counts_up(tensor)}
    starts |= {node.output[0]: 0 for node in graph.node if node.op_type == "Range"}
    sums: dict[str, str] = {}
    if with_masks:
        sums = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "CumSum"}
    return _smallest_table(graph, {**starts, **dict.fromkeys(sums, 1)}, sums)


def _smallest_table(
    graph: onnx.GraphProto, starts: Mapping[str, int], sums: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str] | None:
    """Return the smallest table that one of some tensors indexes. starts: tensor -> its value at the first place.

    sums: tensor that is a running sum -> the mask that it sums, by which it may be multiplied.
    """
    tables = _tables(graph)
    offsets = dict(starts)
    masks = dict(sums)
    constants = {tensor.name: tensor for tensor in _tensors(graph)}
    origin: dict[str, str] = {}
    found: list[tuple[int, str]] = []
    for node in graph.node:  # in topological order
        if not node.input:
            continue
        first = node.input[0]
        result = node.output[0]
        if node.op_type in PASSES_VALUES:
            origin[result] = origin.get(first, first)
        carried, offset = _carried(node, offsets, constants)
        # RoBERTa multiplies its count by the mask, which puts padding at 0: the greatest value stays. A product with
        # anything else is no position
        if node.op_type == "Mul":
            carried = next((each for each in node.input if each in masks), "")
            other = next((each for each in node.input if each != carried), "")
            if not carried or origin.get(other, other) != origin.get(masks[carried], masks[carried]):
                carried = ""
        if carried:
            offsets[result] = offsets[carried] + offset
            masks |= {result: masks[carried]} if carried in masks else {}
        elif _is_lookup(node) and node.input[1] in offsets and first in tables:
            # positions that begin at 2, as RoBERTa's do, leave two rows fewer
            found.append((tables[first] - offsets[node.input[1]], first))
    return min(found, default=None)


def _carried(
    node: onnx.NodeProto, offsets: Mapping[str, int], constants: Mapping[str, onnx.TensorProto]
) -> tuple[str, int]:
    """Return the index that a node passes on, "" if it passes on none, and what it adds to it."""
    first, *others = node.input
    if node.op_type in PASSES_VALUES and first in offsets:
        return first, 0
    if node.op_type not in ("Add", "Sub") or len(others) != 1:
        return "", 0
    if first in offsets and (number := _single_integer(constants.get(others[0]))) is not None:
        return first, number if node.op_type == "Add" else -number
    if node.op_type == "Add" and others[0] in offsets and (number := _single_integer(constants.get(first))) is not None:
        return others[0], number
    return "", 0


def _single_integer(tensor: onnx.TensorProto | None) -> int | None:
    """Return the number that a constant holds; None for several, for floats, and where its bytes are elsewhere."""
    if tensor is None or tensor.data_type not in INTEGERS or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    values = onnx.numpy_helper.to_array(tensor)
    return int(values.ravel()[0]) if values.size == 1 else None


def _counts_up(tensor: onnx.TensorProto) -> bool:
    """Whether a constant holds 0, 1, 2, ... along its last axis, as exporters keep position ids."""
    if tensor.data_type not in INTEGERS:
        return False
    if tensor.data_location == onnx.TensorProto.EXTERNAL or not tensor.dims or tensor.dims[-1] < LEAST_WIDTH:
        return False
    values = onnx.numpy_helper.to_array(tensor)
    return bool((values == np.arange(values.shape[-1])).all())


def _tables(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Return initializer of two dimensions -> its rows, under each name that it is passed on by."""
    rows = {}
    for tensor in _tensors(graph):
        if len(tensor.dims) == 2 and tensor.dims[1] >= LEAST_WIDTH:
            rows[tensor.name] = tensor.dims[0]
    for node in graph.node:
        if node.op_type in ("Identity", "Cast", "DequantizeLinear") and node.input and node.input[0] in rows:
            rows[node.output[0]] = rows[node.input[0]]
    return rows


def _tensors(graph: onnx.GraphProto) -> Iterable[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensor = deepcopy(attribute.t)
                    tensor.name = node.output[0]
                    yield tensor


def _is_lookup(node: onnx.NodeProto) -> bool:
    axes = [attribute.i for attribute in node.attribute if attribute.name == "axis"]
    # without the attribute the axis is 0
    return node.op_type == "Gather" and not any(axes)
