"""Take a part of a file that can be run alone, on tensors of any values."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from onward.trainer.onnx_graph.files.index import nodes_between


def part_between(model: onnx.ModelProto, outputs: Sequence[str], starts: Sequence[str]) -> onnx.ModelProto:
    """Return the nodes from the starts, or from the inputs, to the outputs, as a model."""
    graph = model.graph
    kept, needed = nodes_between(graph, list(outputs), set(starts))
    part = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = graph.name
    part.graph.node.extend(kept)
    for name in starts:
        part.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    weights = {tensor.name for tensor in graph.initializer}
    part.graph.input.extend(value for value in graph.input if value.name in needed - weights - {*starts})
    declared = {value.name: value for value in graph.output}
    for name in outputs:
        # a type without a shape, which an inner tensor may have none of
        part.graph.output.append(declared.get(name) or helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in needed)
    return part
