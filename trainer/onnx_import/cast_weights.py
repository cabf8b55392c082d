"""Find integers that a graph makes weights of by a cast and a scale, as exporters of int8 weights write them.

    q (int8) --- Cast --- Mul(scale)                         w = scale q
    q (int8) --- Cast --- Sub(zero) --- Mul(scale)           w = scale (q - zero)

They are what DequantizeLinear writes in one node, and are trained like its weights (quantized_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from onward.trainer.onnx_graph.index import attributes_of
from onward.trainer.onnx_graph.stored_protos import stored_protos
from onward.trainer.onnx_import.integer_storage import MOVES

INTEGERS = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
Readers = Mapping[str, Sequence[tuple[onnx.NodeProto, int]]]
"""Value -> (node, which of its operands) that read it."""


@dataclass(frozen=True)
class ScaledCast:
    """By what a node multiplies integers that were cast."""

    scale: str
    zero: str = ""
    """What was subtracted before, "" for nothing."""


def readers_of(graph: onnx.GraphProto) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Return the readers of each value of the main graph."""
    found: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in graph.node:
        for position, name in enumerate(node.input):
            found.setdefault(name, []).append((node, position))
    return found


def scaled_casts(cast: onnx.NodeProto, readers: Readers) -> Iterator[ScaledCast | None]:
    """Yield what each reader of a Cast of integers multiplies by; None for a reader that does something else."""
    if attributes_of(cast).get("to") not in FLOATS:
        yield None
        return
    for node, position in readers.get(cast.output[0], ()):
        if node.op_type == "Sub" and position == 0:
            for product, place in readers.get(node.output[0], ()):
                found = _product(product, place)
                yield found and replace(found, zero=node.input[1])
        else:
            yield _product(node, position)


def _product(node: onnx.NodeProto, position: int) -> ScaledCast | None:
    return ScaledCast(node.input[1 - position]) if node.op_type == "Mul" else None


@dataclass(frozen=True)
class CastIntegers:
    """What a graph stores as integers and casts to floats."""

    integers: frozenset[str]
    """Names of the stored integers."""
    scales: frozenset[str]
    """Names of what is multiplied with them or subtracted from them."""


def cast_integers(graph: onnx.GraphProto) -> CastIntegers:
    """Find the stored integers of few bits that are cast to floats, at most moved before."""
    readers = readers_of(graph)
    integers, scales = set[str](), set[str]()

    def casts(value: str) -> Iterator[onnx.NodeProto]:
        for node, position in readers.get(value, ()):
            if node.op_type in MOVES and position == 0 and len(node.output) == 1:
                yield from casts(node.output[0])
            elif node.op_type == "Cast" and attributes_of(node).get("to") in FLOATS:
                yield node

    for name, proto in stored_protos(graph):
        if proto.data_type not in INTEGERS or not any(dim > 1 for dim in proto.dims):
            continue
        for cast in casts(name):
            integers.add(name)
            products = [each for each in scaled_casts(cast, readers) if each is not None]
            scales.update(part for each in products for part in (each.scale, each.zero) if part)
    return CastIntegers(frozenset(integers), frozenset(scales))
