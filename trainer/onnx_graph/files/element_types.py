"""ONNX element types and the torch types that hold them."""

from __future__ import annotations

import torch
from onnx import TensorProto

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.files.index import PACKED_BITS, element_type_name

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
    TensorProto.INT4: torch.int8,  # types of less than a byte are unpacked to one element per byte
    TensorProto.UINT4: torch.uint8,
    TensorProto.INT2: torch.int8,
    TensorProto.UINT2: torch.uint8,
    TensorProto.FLOAT4E2M1: torch.float32,
}
"""ONNX element type -> the torch type that holds its elements; strings and complex numbers have none."""

HALVES: dict[int, torch.dtype] = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}
"""Types of half precision, as torch stores them."""

PACKED = frozenset(PACKED_BITS)
"""Types of less than a byte. Their torch type does not identify them, so tensors carry them as `packed`."""


def torch_dtype(element_type: int) -> torch.dtype:
    """Return the torch type of an ONNX element type. Raises UnsupportedNode for strings and complex numbers."""
    try:
        return DTYPES[element_type]
    except KeyError:
        raise UnsupportedNode(f"its element type {element_type_name(element_type)} cannot be computed") from None
