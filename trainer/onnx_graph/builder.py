"""Nodes put into an ONNX graph that is there already, under names it does not use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class Extension:
    """Appends nodes to `graph`. Names of values begin with "onward." and are used once, in inner graphs too.

    `reserved`: further names that must stay free.
    """

    def __init__(self, graph: onnx.GraphProto, *, reserved: Iterable[str] = ()) -> None:
        self._graph = graph
        self._taken = {*names(graph), *reserved}
        self._constants: dict[tuple[str, bytes], str] = {}

    def free(self, wanted: str) -> str:
        """`wanted`, or the first of wanted_2, wanted_3 ... that nothing is called; taken from now on."""
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken.add(name)
        return name

    def op(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node with one output; returns its name."""
        output = output or self.free(f"onward.{kind}")
        self._graph.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def constant(self, value: float | Sequence[int], kind: type = np.float32) -> str:
        """A number or a list of them (int64) as a Constant node; the same one is stored once."""
        array: np.ndarray[Any, np.dtype[Any]] = np.asarray(value, np.int64 if isinstance(value, Sequence) else kind)
        key = (array.dtype.str + str(array.shape), array.tobytes())
        if key not in self._constants:
            tensor = numpy_helper.from_array(array)
            self._constants[key] = self.op("Constant", value=tensor)
        return self._constants[key]


def names(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name of a value or a node in a graph and the graphs inside it."""
    yield from (value.name for values in (graph.input, graph.output, graph.initializer) for value in values)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from names(inner)
