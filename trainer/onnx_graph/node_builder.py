"""Build ONNX graphs node by node: new models (GraphWriter) and additions to an existing graph (GraphExtender)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from onward.trainer.onnx_graph.files.index import all_names

OPSET = 20
"""The first opset with LayerNormalization and Gelu as single nodes."""

SMALL_BYTES = 1024
"""Initializers below this size may be shapes, axes and the like."""

Array = np.ndarray[Any, np.dtype[Any]]
Dims = Sequence[int | str]


class GraphWriter:
    """Writes a new ONNX graph. `op` returns the name of the value that the node computes."""

    def __init__(self, name: str, *, seed: int = 0, opset: int = OPSET) -> None:
        self.random = np.random.default_rng(seed)
        self.opset = opset
        opsets = [helper.make_opsetid("", opset)]
        self._model = onnx.ModelProto(
            ir_version=helper.find_min_ir_version_for(opsets), producer_name="onward", opset_import=opsets
        )
        self._graph = self._model.graph  # in place: weights of some GB are not copied into a model at the end
        self._graph.name = name

    def input(self, name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> str:
        """Declare a graph input; a string in `dims` is a dynamic dimension."""
        self._graph.input.append(helper.make_tensor_value_info(name, kind, list(dims)))
        return name

    def output(self, name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> None:
        """Declare a graph output; `name` is the result of some `op`."""
        self._graph.output.append(helper.make_tensor_value_info(name, kind, list(dims)))

    def weight(self, name: str, value: Array | Sequence[int] | float) -> str:
        """Store an initializer (fp32 if `value` is a float); the same name is stored once."""
        if name not in {tensor.name for tensor in self._graph.initializer}:
            array = np.array(value, np.float32) if isinstance(value, float) else np.asarray(value)
            self._graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, outputs: Sequence[str] | str = "", **attributes: Any) -> str:
        """Append a node. Return its first output, named by `outputs` or after the node."""
        # the number of the node makes its name unique
        name = f"{kind}_{len(self._graph.node)}"
        names = [outputs or name] if isinstance(outputs, str) else list(outputs)
        self._graph.node.append(helper.make_node(kind, inputs, names, name=name, **attributes))
        return names[0]

    def model(self) -> onnx.ModelProto:
        """Return the finished model, checked (shapes and types included). It may be too large for one file."""
        onnx.checker.check_model(_without_large_weights(self._model), full_check=True)
        return self._model

    def kaiming_uniform(self, *shape: int) -> Array:
        """Draw from U(-b, b) with b = sqrt(6 / fan_in): unit variance after a ReLU (He et al. 2015).

        shape: [out, in, ...].
        """
        bound = math.sqrt(6.0 / math.prod(shape[1:]))
        return self.random.uniform(-bound, bound, shape).astype(np.float32)

    def normal(self, std: float, *shape: int) -> Array:
        """Draw fp32 numbers of a shape from a normal distribution with mean 0 and a standard deviation."""
        return self.random.standard_normal(shape, np.float32) * np.float32(std)


def _without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with inputs in place of the large weights, whose values the checker copies and does not need.

    The shapes of other values depend on small initializers only.
    """
    graph = model.graph
    small = [tensor for tensor in graph.initializer if len(tensor.raw_data) < SMALL_BYTES]
    large = [tensor for tensor in graph.initializer if len(tensor.raw_data) >= SMALL_BYTES]
    inputs = [helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in large]
    checked = helper.make_graph(graph.node, graph.name, [*graph.input, *inputs], graph.output, small)
    return helper.make_model(checked, opset_imports=model.opset_import, ir_version=model.ir_version)


class GraphExtender:
    """Appends nodes to an existing graph. Their outputs get names that begin with "onward." and are free.

    reserved: further names that must not be used. opset: that of the graph.
    """

    def __init__(self, graph: onnx.GraphProto, *, reserved: Iterable[str] = (), opset: int = OPSET) -> None:
        self.graph = graph
        self.opset = opset
        self._taken = {*all_names(graph), *reserved}
        self._constants: dict[tuple[str, bytes], str] = {}

    def free(self, wanted: str) -> str:
        """Return `wanted`, or the first free name of wanted_2, wanted_3, ..., and mark it as taken."""
        name = wanted
        number = 1
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node with one output; return the output's name."""
        output = output or self.free(f"onward.{kind}")
        self.graph.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def inner(self, name: str) -> GraphExtender:
        """Return what appends nodes to a new graph, a branch of If or a body of Loop, whose nodes read these values."""
        extender = GraphExtender(onnx.GraphProto(name=name), opset=self.opset)
        extender._taken = self._taken  # names of inner values must differ from those outside
        return extender

    def append(self, other: onnx.GraphProto, *inputs: str) -> str:
        """Append the nodes and initializers of another graph behind these values; return its first output."""
        # the first prefix that no name has: the same graph may be appended several times
        number = 1
        while any(name.startswith(f"onward.graph_{number}.") for name in self._taken):
            number += 1
        renamed = compose.add_prefix_graph(other, f"onward.graph_{number}.")
        # the values get the names by which the nodes of the other graph read its inputs
        for value, operand in zip(renamed.input, inputs, strict=True):
            self.graph.node.append(helper.make_node("Identity", [operand], [value.name], name=value.name))
        self.graph.node.extend(renamed.node)
        self.graph.initializer.extend(renamed.initializer)
        self.graph.sparse_initializer.extend(renamed.sparse_initializer)
        self._taken.update(all_names(renamed))
        return str(renamed.output[0].name)

    def constant(self, value: float | Sequence[int], kind: type = np.float32) -> str:
        """Return the name of a Constant with a number or a list of numbers (int64); equal ones are stored once."""
        array: Array = np.asarray(value, np.int64 if isinstance(value, Sequence) else kind)
        # with type and shape: the bytes of 1.0 are also those of an integer
        key = (array.dtype.str + str(array.shape), array.tobytes())
        if key not in self._constants:
            tensor = numpy_helper.from_array(array)
            self._constants[key] = self.op("Constant", value=tensor)
        return self._constants[key]
