"""Read ONNX files that may be damaged or hostile: what they state is checked before anything else works with it.

Python's protobuf accepts names that are not UTF-8, and onnx a shape that does not fit the stored values, unknown
element types, and functions that expand to billions of nodes. Each is a traceback or a full memory far from its cause.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, defs, helper, numpy_helper

from onward.trainer.bounds import (
    FUNCTION_DEPTH,
    MODEL_BYTES,
    MODEL_MESSAGES,
    MODEL_NODES,
    TENSOR_DIMS,
    TENSOR_VALUES,
    opened,
)
from onward.trainer.errors import UnsupportedModel, first_lines
from onward.trainer.onnx_graph.files.attribute_bounds import attribute_problems
from onward.trainer.onnx_graph.files.index import PACKED_BITS, all_tensors, innermost_type, length_of, nodes_inside

TYPES = frozenset(int(number) for number in TensorProto.DataType.values())
_CHECKED: set[tuple[int, ...]] = set()
"""Device, inode, size and time of change of good files: one command reads its model several times."""


def read_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without its external data.

    Raises OSError for a file that cannot be opened, UnsupportedModel for one that is not ONNX, and with what is wrong
    inside it: values that do not fit their shape, unknown types, names that are not UTF-8, more than the limits.
    """
    with opened(path) as file:
        # of the open file: another one may have its name by the time it is read
        status = os.fstat(file.fileno())
        if status.st_size > MODEL_BYTES.most:
            size = MODEL_BYTES.exceeded(status.st_size)
            raise UnsupportedModel(f"{path} is not an ONNX file that can be read: it has {size}")
        version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        content = file.read() or b""  # None: a file of the kernel that has nothing just now
    if not content:
        raise UnsupportedModel(f"{path} is an empty file, not an ONNX file")
    try:
        model = onnx.load_model_from_string(content)
    except (DecodeError, ValueError) as error:
        raise UnsupportedModel(f"{path} is not an ONNX file: {other_kind(content) or _why(error)}") from None
    # only good files are remembered: a bad one is refused each time, with its problems
    if version not in _CHECKED:
        refuse_problems(path, model)
        _CHECKED.add(version)
    return model


def refuse_problems(path: Path, model: onnx.ModelProto) -> None:
    """Raise UnsupportedModel with what is wrong inside a file that was parsed, as `read_model` does."""
    if problems := model_problems(model):
        raise UnsupportedModel(f"{path}: {problem}" for problem in first_lines(problems))


def node_of_output(path: Path, tensor: str) -> tuple[str, str] | None:
    """Return (name, operator) of the node of a file that computes a tensor; None if no node of the main graph does."""
    for node in read_model(path).graph.node:
        if tensor in node.output:
            return node.name or tensor, node.op_type
    return None


EXPORT = "export the network to ONNX (docs/how-to/prepare-a-model.md)"
OTHER_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", f"a zip archive, as torch.save and Keras write; {EXPORT}"),
    (b"\x80\x02", f"a pickle, as earlier versions of torch.save write; {EXPORT}"),
    (b"\x80\x03", f"a pickle, as joblib writes; {EXPORT}"),
    (b"\x80\x04", f"a pickle, as joblib writes; {EXPORT}"),
    (b"\x80\x05", f"a pickle, as joblib writes; {EXPORT}"),
    (b"\x89HDF\r\n", f"HDF5, as Keras writes; {EXPORT}"),
    (b"GGUF", f"GGUF, the weights of llama.cpp; {EXPORT}"),
    (b"version https://git-lfs", "a pointer of Git LFS in place of the file; `git lfs pull` gets it"),
    (b"<", "a page of HTML or XML; the download gave something else than the file"),
)
"""First bytes of a file -> what it is, and what to do."""
SAFETENSORS = slice(8, 10)
TFLITE = slice(4, 8)


def other_kind(content: bytes) -> str:
    """Return what a file is in place of ONNX, by its first bytes, and what to do; "" where they do not show it."""
    if content[SAFETENSORS] == b'{"':
        return f"safetensors, which hold weights without a network; {EXPORT}"
    if content[TFLITE] == b"TFL3":
        return "TensorFlow Lite; convert the TensorFlow model with tf2onnx"
    return next((what for start, what in OTHER_KINDS if content.startswith(start)), "")


def _why(error: Exception) -> str:
    if "MaxDepth" in str(error):
        return f"it has more {MODEL_MESSAGES.what} than the limit of {MODEL_MESSAGES.most}"
    return str(error)


def model_problems(model: onnx.ModelProto) -> list[str]:
    """Return a sentence for each thing in a model that nothing else can work with."""
    # names first: the other sentences have them in them
    if problems := list(_not_unicode(model)):
        return problems
    tensors = [problem for tensor in all_tensors(model) for problem in tensor_problems(tensor)]
    return [*_function_problems(model), *_declared_problems(model), *tensors, *attribute_problems(model)]


# -- names


def _not_unicode(model: onnx.ModelProto) -> Iterator[str]:
    """Yield what is not UTF-8. Python's protobuf gives such a name as bytes."""
    graph = model.graph
    values = (*graph.input, *graph.output, *graph.value_info)
    yield from _wrong(
        "a name", (model.producer_name, model.domain, graph.name, *(e.domain for e in model.opset_import))
    )
    yield from _wrong("the name of a value", (value.name for value in values))
    for value in values:
        yield from _wrong("the name of a dimension", (dim.dim_param for dim in value.type.tensor_type.shape.dim))
    yield from _wrong("the name of a tensor", (tensor.name for tensor in all_tensors(model)))
    for tensor in all_tensors(model):
        for entry in tensor.external_data:
            yield from _wrong("the place of external data", (entry.key, entry.value))
    bodies = [graph.node, *(function.node for function in model.functions)]
    for node in (node for body in bodies for node in nodes_inside(body)):
        yield from _wrong("a name of a node", (node.name, node.op_type, node.domain, *node.input, *node.output))
        yield from _wrong("the name of an attribute", (each.name for each in node.attribute))
        yield from _wrong("the name of an attribute", (each.ref_attr_name for each in node.attribute))
    for function in model.functions:
        names = (function.name, function.domain, *function.input, *function.output, *function.attribute)
        yield from _wrong("a name of a function", names)


def _wrong(what: str, names: Iterable[Any]) -> Iterator[str]:
    yield from (f"{what} is not UTF-8: {name[:40]!r}" for name in names if isinstance(name, bytes))


# -- operators and functions


def opset_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Yield a sentence for each version of ONNX's own operators that the installed onnx does not know."""
    newest = defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            yield (
                f"opset {entry.version} is not between 1 and {newest}, the newest that the installed onnx knows; "
                "export the file again"
            )


def _function_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Count the nodes of the graph with all functions expanded, without expanding them.

    A function that calls the next one twice, 29 times over, has 2^29 nodes and a file of some kilobytes.
    """
    bodies = {(function.domain, function.name): function for function in model.functions}
    calls = {key: _count(function.node, bodies) for key, function in bodies.items()}
    known: dict[tuple[str, str], tuple[int, int]] = {}
    """Function -> (nodes, how deep its calls go)."""
    # depth first without recursion, which a chain of calls would exhaust: a function is counted after those it calls
    waiting = list(calls)
    inside = set[tuple[str, str]]()
    while waiting:
        key = waiting[-1]
        own, called = calls[key]
        if key in known:
            waiting.pop()
            inside.discard(key)
        elif missing := [callee for callee in called if callee not in known]:
            # it waits further down already, for a function that calls it
            if key in inside:
                yield f"function {key[1]!r} of domain {key[0]!r} calls itself"
                return
            inside.add(key)
            waiting += missing
        else:
            depth = 1 + max((known[callee][1] for callee in called), default=0)
            known[key] = own + sum(known[callee][0] * times for callee, times in called.items()), depth
    own, called = _count(model.graph.node, bodies)
    total = own + sum(known[callee][0] * times for callee, times in called.items())
    if total > MODEL_NODES.most:
        yield f"it has {MODEL_NODES.exceeded(total)}"
    if (deepest := max((depth for _, depth in known.values()), default=0)) > FUNCTION_DEPTH.most:
        yield f"it has {FUNCTION_DEPTH.exceeded(deepest)}"


def _count(
    nodes: Iterable[onnx.NodeProto], functions: Mapping[tuple[str, str], Any]
) -> tuple[int, dict[tuple[str, str], int]]:
    """Return the number of nodes that call no function, and how often each function is called."""
    own = 0
    called = dict[tuple[str, str], int]()
    for node in nodes_inside(nodes):
        key = node.domain, node.op_type
        if key in functions:
            called[key] = called.get(key, 0) + 1
        else:
            own += 1
    return own, called


# -- shapes and values


def _declared_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Yield what is wrong with the types of inputs, outputs and values between."""
    graph = model.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = innermost_type(value)
        if kind.tensor_type.elem_type not in TYPES:
            yield f"value {value.name!r} has element type {kind.tensor_type.elem_type}, which is no type of ONNX"
        # a negative length is what exporters of Paddle write for an unknown one (`index.length_of`)
        dims = [length for dim in kind.tensor_type.shape.dim if (length := length_of(dim)) is not None]
        yield from (f"value {value.name!r} {problem}" for problem in _shape_problems(dims))


def _shape_problems(dims: list[int]) -> Iterator[str]:
    if len(dims) > TENSOR_DIMS.most:
        yield f"has a shape of {TENSOR_DIMS.exceeded(len(dims))}"
    elif any(length < 0 for length in dims):
        yield f"has shape {dims}, with a negative length"
    elif (total := math.prod(filter(None, dims))) > TENSOR_VALUES.most:
        yield f"has shape {dims}, of {TENSOR_VALUES.exceeded(total)}"


def tensor_problems(tensor: TensorProto) -> Iterator[str]:
    """Yield why a stored tensor cannot be read: its type, its shape, or values that do not fit the shape."""
    name = f"tensor {tensor.name!r}"
    kind = tensor.data_type
    if isinstance(tensor.name, bytes):
        yield f"{name} has a name that is not UTF-8"
    if kind not in TYPES or kind == TensorProto.UNDEFINED:
        yield f"{name} is of type number {kind}, which the installed onnx does not know"
        return
    dims = list(tensor.dims)
    if problems := list(_shape_problems(dims)):
        yield from (f"{name} {problem}" for problem in problems)
        return
    if tensor.data_location == TensorProto.EXTERNAL:
        return  # external_data.py compares with the file
    wanted = math.prod(dims)
    held = _num_values(tensor)
    if held not in (wanted, None):
        yield f"{name} holds {held:g} values, but its shape takes {wanted}; the file is damaged"


def _num_values(tensor: TensorProto) -> float | None:
    """Return how many values are stored; the number of the shape if the last byte is partly used; None = unknown."""
    kind = tensor.data_type
    if bits := PACKED_BITS.get(kind):
        wanted = math.prod(tensor.dims)
        # without raw data an int32 holds one byte of packed elements
        held = len(tensor.raw_data) if tensor.HasField("raw_data") else len(tensor.int32_data)
        return wanted if held == -(-wanted * bits // 8) else held * 8 / bits
    if kind == TensorProto.STRING:
        return len(tensor.string_data)
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data) / np.dtype(helper.tensor_dtype_to_np_dtype(kind)).itemsize
    count = len(getattr(tensor, helper.tensor_dtype_to_field(kind)))
    # real and imaginary parts are two entries
    return count / 2 if kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else count


def stored_array(tensor: TensorProto) -> np.ndarray[Any, Any]:
    """Return the values of a tensor, in its shape. Raises UnsupportedModel for external data.

    numpy_helper.to_array alone would look for the file in the working directory.
    """
    if tensor.data_location == TensorProto.EXTERNAL:
        raise UnsupportedModel(
            f"tensor {tensor.name!r} is small and has its values in another file; store them in the ONNX file itself "
            "(onnx.save without save_as_external_data, or with a size_threshold)"
        )
    return numpy_helper.to_array(tensor)
