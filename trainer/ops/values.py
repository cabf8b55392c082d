"""The values that flow through an import: element types, tensors of the file, and integers known on the host.

A value is one of: a `Traced` (known at run time), a `torch.Tensor` (a constant), a `HostInts` (shape
arithmetic), a list of values (an ONNX sequence), or None (an optional input left out).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper

Value: TypeAlias = Any
HostInts: TypeAlias = np.ndarray[Any, np.dtype[np.object_]]
"""An int64 tensor held as a numpy array of objects: Python ints, and `Traced` ints for dynamic dimensions."""


class Unsupported(Exception):
    """Why one node cannot be imported: a clause that follows "because"."""


class RunTime(Unsupported):
    """What one node needs is known only when the graph runs: it becomes a leaf (trainer/ops/leaf.py).

    Any rule may raise it; the same rule is then called with real tensors each time the graph runs.
    """


DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float32,  # half-precision files are computed and trained in fp32;
    TensorProto.BFLOAT16: torch.float32,  # rounding happens once, when they are written back
    TensorProto.DOUBLE: torch.float64,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
}


def torch_dtype(element_type: int) -> torch.dtype:
    """The torch type that holds an ONNX element type. Raises Unsupported for strings, complex and sub-byte types."""
    try:
        return DTYPES[element_type]
    except KeyError:
        raise Unsupported(f"its element type {element_type_name(element_type)} cannot be computed") from None


def element_type_name(element_type: int) -> str:
    """The name ONNX gives an element type, such as FLOAT8E4M3FN."""
    names = {int(value): str(name) for name, value in TensorProto.DataType.items()}
    return names.get(element_type, f"number {element_type}")


def read_tensor(proto: TensorProto, base: Path | None = None) -> torch.Tensor:
    """A copy of a stored tensor. `base`: the directory of its external data file, if it has one."""
    dtype = torch_dtype(proto.data_type)
    array = numpy_helper.to_array(proto, str(base or ""))
    if proto.data_type == TensorProto.BFLOAT16:
        array = array.astype(np.float32)
    return torch.from_numpy(np.array(array)).to(dtype)


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """An attribute as a Python value: strings as str, tensors and graphs as protos."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str | int | float) or not hasattr(value, "__iter__"):
        return value
    return [item.decode() if isinstance(item, bytes) else item for item in value]
