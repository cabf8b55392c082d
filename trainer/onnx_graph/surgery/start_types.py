"""Complete the type of a tensor at which the trained part begins, where ONNX leaves lengths open that the file fixes.

    image [3, 320, 320] --- Resize --- Pad --- Unsqueeze --- start    ONNX [1, ?, ?, ?], onnxruntime [1, 3, 320, 320]

onnxruntime folds the nodes that compute sizes when it opens a file; ONNX does not follow all of them.
"""

from __future__ import annotations

import math
from copy import deepcopy

import onnx

from onward.trainer.onnx_graph.files.index import SMALL, dims_of
from onward.trainer.onnx_graph.graph_parts import part_between


def start_type(model: onnx.ModelProto, value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """Return the type of a start tensor with the lengths that onnxruntime knows; as it is behind nodes with weights."""
    dims = dims_of(value)
    if dims is not None and None not in dims[1:]:
        return value
    before = part_between(model, [value.name], ())
    if any(math.prod(tensor.dims) > SMALL for tensor in before.graph.initializer):
        return value
    # imported here because few files need it
    from onward.trainer.onnx_graph.files.onnxruntime_session import open_session

    try:
        shape = open_session(before).get_outputs()[0].shape
    except Exception:  # onnxruntime's errors have no common base class
        return value
    complete = deepcopy(value)
    entries = complete.type.tensor_type.shape.dim
    for place, length in enumerate(shape):
        entry = entries[place] if dims is not None else entries.add()
        if isinstance(length, int) and length > 0:
            entry.dim_value = length
    return complete if shape else value
