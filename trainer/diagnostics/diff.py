"""Compare two ONNX files: structure, metadata, and how far each tensor changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onward.trainer.diagnostics.difference import Difference, NodeChange, TensorChange
from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.attribute_weights import held_by
from onward.trainer.onnx_graph.files.external_ranges import (
    BYTEWISE_SIZES,
    byte_range,
    external_problems,
    is_external,
)
from onward.trainer.onnx_graph.files.index import element_type_name, locations, operator_of, shape_text
from onward.trainer.onnx_graph.files.model_files import read_model, stored_array
from onward.trainer.onnx_graph.files.stored_protos import read_chunks
from onward.trainer.onnx_graph.inner_tensors import all_stored_protos, without_inner_values
from onward.trainer.onnx_graph.surgery.strip_training import strip_training


def compare(a: Path, b: Path, *, parsed_b: onnx.ModelProto | None = None) -> Difference:
    """Compare two files; external data is read in chunks, so memory does not grow with it.

    parsed_b: what the second file holds, None = it is read here. Raises ConfigError or UnsupportedModel when one of
    them cannot be read.
    """
    given = _read(a)
    after = _read(b, parsed_b)
    before, stripped = _as_stripped(given, after, a.parent)
    tensors, equal = _tensor_changes(before, a.parent, after, b.parent)
    # tensors are compared by their values, so they must not count as a difference of nodes or attributes as well
    bare = without_inner_values(before)
    bare_after = without_inner_values(after)
    return Difference(
        a=a,
        b=b,
        same_bytes=_same_content(a, b) and _same_sides(given, a.parent, after, b.parent),
        model=tuple(_model_changes(bare, bare_after)),
        interface=tuple(_interface_changes(before.graph, after.graph)),
        nodes=tuple(_node_changes(bare.graph, bare_after.graph)),
        # weights first: a new head changes shapes as well, which follow from it
        tensors=tuple(sorted(tensors, key=lambda change: not change.is_weight)),
        equal_tensors=equal,
        stripped=stripped,
    )


def _as_stripped(before: onnx.ModelProto, after: onnx.ModelProto, base: Path) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return the first model without the training-only nodes that the second lacks, and how many those are.

    The model itself where nothing explains a difference of nodes.
    """
    changes = len(list(_node_changes(before.graph, after.graph)))
    if not changes and list(before.functions) == list(after.functions):
        return before, {}
    without = deepcopy(before)
    # the nodes that the second file still has are no training-only ones
    kept = [name for node in after.graph.node for name in node.output]
    removed = strip_training(without, keep=kept, base=base)
    left = len(list(_node_changes(without.graph, after.graph)))
    # stripping must bring the files nearer to each other, or it is no explanation
    explains = left < changes or list(without.functions) == list(after.functions) != list(before.functions)
    return (without, dict(removed)) if removed and explains else (before, {})


def _read(path: Path, parsed: onnx.ModelProto | None = None) -> onnx.ModelProto:
    try:
        model = read_model(path) if parsed is None else parsed
    except OSError as error:
        raise ConfigError(f"cannot read the model {path}: {error.strerror}") from None
    if not model.HasField("graph"):
        raise UnsupportedModel(f"{path} is not an ONNX file: it holds no graph")
    if problems := external_problems(model, path.parent):
        raise UnsupportedModel(problems)
    return model


def _same_content(a: Path, b: Path) -> bool:
    # files of several gigabytes are read only if they can be equal
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as first, b.open("rb") as second:
        return all(x == y for x, y in iter(lambda: (first.read(2**20), second.read(2**20)), (b"", b"")))


def _same_sides(a: onnx.ModelProto, base_a: Path, b: onnx.ModelProto, base_b: Path) -> bool:
    names_a, names_b = locations(a), locations(b)
    return names_a == names_b and all(_same_content(base_a / name, base_b / name) for name in names_a)


# -- structure


def _model_changes(a: onnx.ModelProto, b: onnx.ModelProto) -> Iterator[str]:
    for name in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if getattr(a, name) != getattr(b, name):
            yield f"{name.replace('_', ' ')}: {getattr(a, name)!r} -> {getattr(b, name)!r}"
    if a.graph.name != b.graph.name:
        yield f"graph name: {a.graph.name!r} -> {b.graph.name!r}"
    # as mappings, because the order of these entries means nothing
    opsets = []
    for model in (a, b):
        opsets.append({entry.domain or "ai.onnx": str(entry.version) for entry in model.opset_import})
    metadata = [{entry.key: entry.value for entry in model.metadata_props} for model in (a, b)]
    functions = [
        {f"{body.domain}.{body.name}": body.SerializeToString(deterministic=True) for body in model.functions}
        for model in (a, b)
    ]
    yield from _entries("opset of", *opsets)
    yield from _entries("metadata", *metadata)
    for name in sorted(functions[0].keys() | functions[1].keys()):
        if functions[0].get(name) != functions[1].get(name):
            change = "changed"
            if name not in functions[0]:
                change = "added"
            elif name not in functions[1]:
                change = "removed"
            yield f"function {name}: {change}"


def _entries(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            yield f"{what} {key}: {a.get(key, 'none')} -> {b.get(key, 'none')}"


def _interface_changes(a: onnx.GraphProto, b: onnx.GraphProto) -> Iterator[str]:
    for what in ("input", "output"):
        before, after = ([_value(value) for value in getattr(graph, what)] for graph in (a, b))
        for was, now in zip_longest(before, after, fillvalue="none"):
            if was != now:
                yield f"{what}: {was} -> {now}"


def _value(value: onnx.ValueInfoProto) -> str:
    if not value.type.HasField("tensor_type"):
        return f"{value.name} {value.type.WhichOneof('value')}"
    return f"{value.name} {_type_name(value.type.tensor_type.elem_type)} {shape_text(value)}"


def _type_name(element_type: int) -> str:
    name = element_type_name(element_type).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _node_changes(a: onnx.GraphProto, b: onnx.GraphProto) -> Iterator[NodeChange]:
    """Yield differences of nodes; two nodes correspond if they have the same first output, or else the same name."""
    before, after = ({_key(node): node for node in graph.node} for graph in (a, b))
    # exporters renumber outputs, so nodes without a counterpart by output are matched by name
    unmatched = [node for key, node in after.items() if key not in before]
    named = {node.name: node for node in unmatched if node.name}
    pairs = [(node, after.get(key) or named.get(node.name)) for key, node in before.items()]
    for node, counterpart in pairs:
        if counterpart is None:
            yield _node_change(node, "removed")
        elif what := list(_changes(node, counterpart)):
            yield _node_change(node, "; ".join(what))
    found = {id(counterpart) for _, counterpart in pairs}
    yield from (_node_change(node, "added") for node in after.values() if id(node) not in found)
    kept = [_key(counterpart) for _, counterpart in pairs if counterpart is not None]
    known = set(kept)
    # the order of the nodes that both files have, so that an added one does not shift all others
    if kept != [key for key in after if key in known]:
        yield NodeChange(node="", operator="", change="the order of nodes differs")


def _key(node: onnx.NodeProto) -> str:
    return next(filter(None, node.output), node.name)


def _node_change(node: onnx.NodeProto, change: str) -> NodeChange:
    return NodeChange(node=node.name or _key(node), operator=operator_of(node), change=change)


def _changes(a: onnx.NodeProto, b: onnx.NodeProto) -> Iterator[str]:
    if (a.domain, a.op_type) != (b.domain, b.op_type):
        yield f"operator {a.op_type} -> {b.op_type}"
    for what in ("input", "output"):
        if list(getattr(a, what)) != list(getattr(b, what)):
            yield f"{what}s {', '.join(getattr(a, what))} -> {', '.join(getattr(b, what))}"
    before, after = ({attribute.name: attribute for attribute in node.attribute} for node in (a, b))
    # attributes that hold tensors appear among the tensors, where the difference has a size
    held: set[str] = set()
    if a.op_type == b.op_type:
        held = {attribute.name for attribute in held_by(a)}
        if a.op_type == "Constant":
            held.add("value")
        held &= before.keys() & after.keys()
    for name in sorted(before.keys() | after.keys()):
        if name in held:
            continue  # compared as a tensor
        was, now = (_attribute(attributes.get(name)) for attributes in (before, after))
        if was != now:
            yield f"{name} {was} -> {now}"
    if a.name != b.name:
        yield f"name {a.name!r} -> {b.name!r}"


def _attribute(attribute: onnx.AttributeProto | None) -> str:
    if attribute is None:
        return "none"
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, int | float | bytes):
        return repr(value)
    if attribute.ints or attribute.floats or attribute.strings:
        return repr(list(value))
    return f"{attribute.SerializeToString(deterministic=True)!r:.60}... ({attribute.ByteSize()} bytes)"


# -- tensors


def _tensor_changes(
    a: onnx.ModelProto, base_a: Path, b: onnx.ModelProto, base_b: Path
) -> tuple[Sequence[TensorChange], int]:
    before = all_stored_protos(a)
    after = all_stored_protos(b)
    changes = []
    equal = 0
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            changes.append(TensorChange(name=name, change="removed", before=_shape(was)))
        elif _shape(was) != _shape(now):
            changes.append(
                TensorChange(name=name, change="another shape or type", before=_shape(was), after=_shape(now))
            )
        elif change := _tensor_change(name, (was, base_a), (now, base_b)):
            changes.append(change)
        else:
            equal += 1
    added = [name for name in after if name not in before]
    changes += [TensorChange(name=name, change="added", after=_shape(after[name])) for name in added]
    return changes, equal


def _shape(proto: TensorProto) -> str:
    return f"{_type_name(proto.data_type)} {list(proto.dims)}"


def _tensor_change(name: str, a: tuple[TensorProto, Path], b: tuple[TensorProto, Path]) -> TensorChange | None:
    """Return how far a tensor changed; None if its values are equal bit by bit."""
    shape = _shape(a[0])
    if a[0].data_type not in BYTEWISE_SIZES:
        same = [_content(*side) for side in (a, b)]
        return None if same[0] == same[1] else TensorChange(name=name, change="values", before=shape, after=shape)
    changed = 0
    greatest = moved = was = now = dot = 0.0
    # sums in float64 over chunks: external data may be larger than memory
    for x, y in zip(read_chunks(*a), read_chunks(*b), strict=True):
        # as integers, because NaN differs from itself and -0.0 equals 0.0
        bits = x.view(BITS[x.itemsize]) != y.view(BITS[x.itemsize])
        changed += int(bits.sum())
        with np.errstate(all="ignore"):  # the values may be infinite
            x = x.astype(np.float64)
            y = y.astype(np.float64)
            if bits.any():
                difference = (y - x)[bits]
                furthest = float(np.abs(difference).max())
                greatest = greatest if furthest <= greatest else furthest  # NaN is the greatest
                moved += float(difference @ difference)
            # over all elements, and not the changed ones alone: relative change and angle are those of the whole tensor
            was += float(x @ x)
            now += float(y @ y)
            dot += float(x @ y)
    if not changed:
        return None
    # without a length neither a ratio nor an angle is defined
    relative = math.sqrt(moved / was) if was else None
    cosine = dot / math.sqrt(was * now) if was and now else None
    return TensorChange(
        name=name,
        change="values",
        before=shape,
        after=shape,
        changed=changed,
        relative=relative,
        greatest=greatest,
        cosine=cosine,
    )


BITS: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Element size in bytes -> integers of that size, which are equal exactly if the bits are (NaN included)."""


def _content(proto: TensorProto, base: Path) -> bytes:
    """Return the bytes of a tensor whose type is not in BYTEWISE_SIZES."""
    if not is_external(proto):
        strings = [len(each).to_bytes(8) + each for each in proto.string_data]  # an array of them holds addresses
        return b"".join(strings) or stored_array(proto).tobytes()
    where = byte_range(proto)
    with (base / where.location).open("rb") as file:
        file.seek(where.offset)
        return file.read(where.length)
