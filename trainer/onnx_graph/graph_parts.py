"""Cut a part out of an ONNX graph that onnxruntime runs alone."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from onward.trainer.onnx_graph.files.index import nodes_between, part_with


def part_between(model: onnx.ModelProto, outputs: Sequence[str], starts: Sequence[str]) -> onnx.ModelProto:
    """Return the nodes from the starts, or from the inputs, to the outputs, for onnxruntime.

    The starts are inputs in fp32 of any shape, in their order, in front of the inputs of the graph that are read.
    """
    graph = model.graph
    kept, needed = nodes_between(graph, list(outputs), set(starts))
    part = part_with(model, kept)
    part.ir_version = max(model.ir_version, 4)
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
