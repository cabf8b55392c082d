"""Read TensorProtos and numpy arrays as torch tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.onnx_graph.files.element_types import PACKED, torch_dtype
from onward.trainer.onnx_graph.files.external_ranges import array_of


def read_tensor(proto: TensorProto, base: Path | None = None) -> torch.Tensor:
    """Return a copy of a stored tensor, in its shape. base: the directory of its external data file, if it has one."""
    torch_dtype(proto.data_type)  # raises for types without a torch type
    tensor = tensor_from_array(numpy_helper.to_array(proto) if base is None else array_of(proto, base))
    if proto.data_type in PACKED:
        tensor.packed = proto.data_type  # type: ignore[attr-defined]
    return tensor


def tensor_from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy of an array as a tensor of the same shape, in the torch type that DTYPES gives its ONNX type."""
    element_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    dtype = torch_dtype(element_type)
    # torch takes no array of numpy's 8-bit floats, which are types of ml_dtypes: their bytes pass as integers
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.from_numpy(np.array(array).view(np.uint8)).view(dtype)
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":  # types of ml_dtypes, which torch does not take
        array = array.astype(np.float32)
    elif array.dtype.kind in "iu":
        array = array.astype(np.dtype(array.dtype.str))  # C's long long is not always numpy's int64 by name
    return torch.from_numpy(np.array(array)).to(dtype)
