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
from onnx import TensorProto, helper, numpy_helper

Value: TypeAlias = Any
HostInts: TypeAlias = np.ndarray[Any, np.dtype[np.object_]]
"""An int64 tensor held as a numpy array of objects: Python ints, and `Traced` ints for dynamic dimensions."""


class Unsupported(Exception):
    """Why one node cannot be imported: a clause that follows "because"."""


class RunTime(Unsupported):
    """What one node needs is known only when the graph runs: it becomes a leaf (trainer/onnx_import/runtime_node.py).

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
    TensorProto.UINT16: torch.uint16,
    TensorProto.INT16: torch.int16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.INT32: torch.int32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.INT64: torch.int64,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.FLOAT8E8M0: torch.float8_e8m0fnu,
    TensorProto.INT4: torch.int8,  # one element in a byte: what is smaller than a byte
    TensorProto.UINT4: torch.uint8,  # is only unpacked here
    TensorProto.INT2: torch.int8,
    TensorProto.UINT2: torch.uint8,
    TensorProto.FLOAT4E2M1: torch.float32,
}
"""What holds the elements of each ONNX type; strings and complex numbers have none."""


def torch_dtype(element_type: int) -> torch.dtype:
    """The torch type that holds an ONNX element type. Raises Unsupported for strings and complex numbers."""
    try:
        return DTYPES[element_type]
    except KeyError:
        raise Unsupported(f"its element type {element_type_name(element_type)} cannot be computed") from None


def element_type_name(element_type: int) -> str:
    """The name ONNX gives an element type, such as FLOAT8E4M3FN."""
    names = {int(value): str(name) for name, value in TensorProto.DataType.items()}
    return names.get(element_type, f"number {element_type}")


PACKED = frozenset((TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2, TensorProto.FLOAT4E2M1))
"""The types of less than a byte. What holds them does not tell them; `element_type` does, where it is known."""


def element_type(value: Value) -> int:
    """The ONNX type of a value: of several that are held alike the first, unless the file said which.

    A `Traced` or a constant of a PACKED type carries it as `packed`.
    """
    packed = getattr(value, "packed", None)
    return packed or next((element for element, dtype in DTYPES.items() if dtype == value.dtype), TensorProto.INT64)


def read_tensor(proto: TensorProto, base: Path | None = None) -> torch.Tensor:
    """A copy of a stored tensor. `base`: the directory of its external data file, if it has one."""
    torch_dtype(proto.data_type)
    tensor = from_array(numpy_helper.to_array(proto, str(base or "")))
    if proto.data_type in PACKED:
        tensor.packed = proto.data_type  # type: ignore[attr-defined]
    return tensor


def from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor with a copy of an array's values, in the type that holds them here (see DTYPES)."""
    element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    dtype = torch_dtype(element_type)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.from_numpy(np.array(array).view(np.uint8)).view(dtype)
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":  # of the package ml_dtypes: numpy has no such types
        array = array.astype(np.float32)
    elif array.dtype.kind in "iu":
        array = array.astype(np.dtype(array.dtype.str))  # C's long long is not always numpy's int64 by name
    return torch.from_numpy(np.array(array)).to(dtype)


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """An attribute as a Python value: strings as str, tensors and graphs as protos."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str | int | float) or not hasattr(value, "__iter__"):
        return value
    return [item.decode() if isinstance(item, bytes) else item for item in value]
