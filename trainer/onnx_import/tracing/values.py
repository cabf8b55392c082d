"""The values that operator rules take and return while a graph is imported.

A value is one of

    Traced          a tensor or an integer that is known when the graph runs
    torch.Tensor    a constant
    ShapeArray      an int64 tensor made by shape arithmetic, held as Python ints and traced ints
    list            an ONNX sequence of values
    None            an optional input that the node leaves out
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from onnx import TensorProto
from torch import fx

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.files.element_types import DTYPES

if TYPE_CHECKING:
    from onward.trainer.onnx_import.tracing.tracing import Tracer

Value: TypeAlias = Any
ShapeArray: TypeAlias = np.ndarray[Any, np.dtype[np.object_]]
"""A numpy array of objects: Python ints, and `Traced` ints for the lengths of dynamic dimensions."""


class NeedsRuntimeValues(UnsupportedNode):
    """A rule needs a shape or a value that is known only when the graph runs.

    Any rule may raise it. The node then becomes a RuntimeNode (runtime_node.py), which calls the same rule with real
    tensors each time the graph runs.
    """


class Traced:
    """A tensor, an integer or a sequence of tensors that is known when the graph runs.

    `probes` holds what it is at each of the two trial sizes: two meta tensors, or two ints (see tracing.py). The
    result of a runtime node may have no probes; reading them, or the rank or type, then raises NeedsRuntimeValues.
    """

    __slots__ = ("_probes", "node", "packed", "tracer")

    def __init__(self, tracer: Tracer, node: fx.Node, probes: tuple[Any, Any] | None) -> None:
        self.tracer = tracer
        self.node = node
        self._probes = probes
        self.packed: int | None = None  # an ONNX type of less than a byte, see `element_type`
        # passes over the finished graph read ranks, when no rule is running any more
        if probes is not None and isinstance(probes[0], torch.Tensor):
            node.meta["rank"] = probes[0].ndim
        node.meta["probes"] = probes  # for the passes (passes/rewriter.py)

    @property
    def known(self) -> bool:
        """Return whether rank and type are known before the graph runs."""
        # without probes even the rank is open until the graph runs
        return self._probes is not None

    @property
    def probes(self) -> tuple[Any, Any]:
        if self._probes is None:
            raise NeedsRuntimeValues("the shape of an operand is known only at run time")
        return self._probes

    @property
    def is_tensor(self) -> bool:
        """Return whether it is known to be a tensor."""
        return self._probes is not None and isinstance(self._probes[0], torch.Tensor)

    @property
    def is_dynamic(self) -> bool:
        """Return whether its shape, or the integer itself, differs between the two trial sizes."""
        # a tensor is dynamic by its shape, an integer by itself
        first, second = self.probes
        return bool(first.shape != second.shape if isinstance(first, torch.Tensor) else first != second)

    @property
    def ndim(self) -> int:
        return int(self.probes[0].ndim)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.probes[0].dtype
        return dtype

    # Arithmetic is for traced integers only; it lets rules compute lengths as if they were Python ints.
    def __add__(self, other: Value) -> Value:
        return self.tracer.call(operator.add, self, other)

    def __radd__(self, other: Value) -> Value:
        return self.tracer.call(operator.add, other, self)

    def __sub__(self, other: Value) -> Value:
        return self.tracer.call(operator.sub, self, other)

    def __rsub__(self, other: Value) -> Value:
        return self.tracer.call(operator.sub, other, self)

    def __mul__(self, other: Value) -> Value:
        return self.tracer.call(operator.mul, self, other)

    def __rmul__(self, other: Value) -> Value:
        return self.tracer.call(operator.mul, other, self)

    def __floordiv__(self, other: Value) -> Value:
        return self.tracer.call(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Value) -> Value:
        return self.tracer.call(operator.floordiv, other, self)

    def __mod__(self, other: Value) -> Value:
        return self.tracer.call(operator.mod, self, other)

    def __neg__(self) -> Value:
        return self.tracer.call(operator.neg, self)


@dataclass(frozen=True)
class FreedBatch:
    """The batch of a file that declares it as fixed, while the graph is traced as if it were dynamic."""

    declared: int
    """The batch size that constants of the file were computed for."""
    trial: tuple[int, int]
    """The batch at the two trial sizes."""
    length: Traced
    """The batch size when the graph runs."""

    def multiple(self, length: Value) -> int:
        """Return m if a length is m x batch at both trial sizes, else 0."""
        first, second = length.probes if isinstance(length, Traced) else (length, length)
        # a length that is m x batch at one trial size alone is so by chance
        times = first // self.trial[0]
        return times if (first, second) == (times * self.trial[0], times * self.trial[1]) else 0


def element_type(value: Value) -> int:
    """Return the ONNX element type of a value.

    One torch type may hold several ONNX types (fp32 also holds FLOAT16). The first in DTYPES is returned, unless the
    value carries its type of less than a byte as `packed`.
    """
    # torch has no types of less than a byte: the mark says which one a byte stands for
    packed: int | None = getattr(value, "packed", None)
    if packed:
        return packed
    return next((element for element, dtype in DTYPES.items() if dtype == value.dtype), TensorProto.INT64)


def shape_array(tensor: torch.Tensor) -> ShapeArray:
    """Return the elements of a constant tensor as a ShapeArray of the same shape."""
    # objects, since numpy would make a number of a traced length
    array = np.empty(tuple(tensor.shape), dtype=object)
    array[...] = np.array(tensor.tolist(), dtype=object)
    return array
