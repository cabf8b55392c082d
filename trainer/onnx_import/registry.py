"""The operator table: `lower` files one function for each ONNX operator and the versions whose meaning it has.

    @lower("Gelu", since=(20,))
    def gelu(c: Call, x: Value) -> Value:
        return c(F.gelu, x, approximate=c.attr("approximate", "none"))

`c(f, ...)` records a call when an operand is known only at run time, and computes otherwise: the same
function builds graphs, folds constants and runs eagerly. A rule that must know what only the run can tell
raises `RunTime` (the methods of `Call` do), and is called again with real tensors each time the graph runs.
A version that is not listed, an input the function does not take and an attribute it did not read are
refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.element_types import torch_dtype
from onward.trainer.onnx_graph.index import attribute_value
from onward.trainer.onnx_import.eager import EagerTracer
from onward.trainer.onnx_import.tracing import Tracer
from onward.trainer.onnx_import.values import NeedsRuntimeValues, ShapeArray, Value, element_type

Rule = Callable[..., Value]
RunBody = Callable[[onnx.GraphProto, Sequence[Value]], list[Value]]

RULES: dict[tuple[str, int], Rule] = {}
"""(operator, since_version) -> the function that lowers it; in other domains than ONNX's, "domain.operator"."""

SHAPE_RULES: dict[str, Rule] = {}
"""Operator -> how it works on host integers alone (trainer/onnx_import/ops/shape_arithmetic.py)."""


def lower(*operators: str, since: Sequence[int]) -> Callable[[Rule], Rule]:
    """File a rule for these operators, in the versions `since` (the opsets in which the definition changed)."""

    def file(rule: Rule) -> Rule:
        for operator in operators:
            for version in since:
                assert (operator, version) not in RULES, f"{operator}-{version} has two rules"
                RULES[operator, version] = rule
        return rule

    return file


def shape_rule(*operators: str) -> Callable[[Rule], Rule]:
    """File how operators work on host integers; the rule may return NotImplemented to pass."""

    def file(rule: Rule) -> Rule:
        SHAPE_RULES.update(dict.fromkeys(operators, rule))
        return rule

    return file


class Call:
    """One node being lowered: its attributes, its version, and `c(f, ...)` to compute with."""

    def __init__(
        self,
        node: onnx.NodeProto,
        version: int,
        tracer: Tracer,
        *,
        batch: int | None = None,
        run_body: RunBody | None = None,
    ) -> None:
        self.op = node.op_type
        self.version = version
        self.tracer = tracer
        self.batch = batch
        """The leading dimension all inputs declare, when it is taken for a batch of any size (see `reshape`)."""
        self.num_outputs = len(node.output)
        self._node = node
        self._attributes = {attribute.name: attribute for attribute in node.attribute}
        self._read: set[str] = set()
        self._run_body = run_body

    def __call__(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Value:
        return self.tracer.call(function, *args, **kwargs)

    def module(self, module: nn.Module, *args: Any) -> Value:
        """Apply a module that follows train() and eval(), hung on the graph under the node's name."""
        name = self._node.name or self._node.output[0]
        return self.tracer.call_module(name.replace(".", "_").replace("/", "_") or self.op, module, *args)

    @property
    def eager(self) -> bool:
        """Whether it computes with real tensors now, rather than building a graph."""
        return isinstance(self.tracer, EagerTracer)

    def body(self, name: str, inputs: Sequence[Value]) -> list[Value]:
        """The results of an inner graph, an attribute, for these inputs; it reads the values around the node too."""
        assert self._run_body is not None, "inner graphs are run by a walk"
        return self._run_body(self.attr(name), inputs)

    # -- attributes

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or what its absence means."""
        self._read.add(name)
        return attribute_value(self._attributes[name]) if name in self._attributes else default

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse an attribute that is present with a value other than those implemented."""
        value = self.attr(name, allowed[0])
        if value not in allowed:
            raise UnsupportedNode(f"{name}={value!r} is not implemented (only {', '.join(map(repr, allowed))})")

    def unread(self) -> list[str]:
        """Attributes the rule has not looked at, and so does not implement."""
        return sorted(set(self._attributes) - self._read)

    def wants(self, output: int) -> bool:
        """Whether the node has this output; its name may be empty."""
        return output < len(self._node.output) and bool(self._node.output[output])

    # -- values

    def size(self, x: Value, dim: int) -> Value:
        """The length of a dimension: an int, or a traced int if it is dynamic."""
        return self.tracer.size(x, dim)

    def sizes(self, x: Value) -> list[Value]:
        """All lengths."""
        return [self.tracer.size(x, dim) for dim in range(x.ndim)]

    def ints(self, x: Value) -> list[Value]:
        """A 0-d or 1-d integer operand as host integers. Raises RunTime if it is known only at run time."""
        array = self.tracer.shape_ints(x)
        if array is None:
            raise NeedsRuntimeValues("an operand that must be a constant or a shape is computed at run time")
        return list(array.reshape(-1))

    def axis(self, x: Value, axis: int) -> int:
        """An axis counted from the front."""
        if not -x.ndim <= axis <= max(x.ndim - 1, 0):
            raise UnsupportedNode(f"axis {axis} is outside a tensor of {x.ndim} dimensions")
        return int(axis % max(x.ndim, 1))

    def axes(self, given: Value) -> list[int] | None:
        """Axes from the attribute of older versions or from the input of newer ones; None if neither is there."""
        if given is None:
            attribute = self.attr("axes")
            return None if attribute is None else list(attribute)
        return [int(axis) for axis in self.ints(given)]

    def number(self, x: Value) -> float | int | bool:
        """A constant of one element as a Python number. Raises RunTime if it is known only at run time."""
        if isinstance(x, torch.Tensor) and x.numel() == 1:
            return x.item()
        raise NeedsRuntimeValues("an operand that must be a constant number is computed at run time")

    def constant(self, x: Value) -> torch.Tensor:
        """A constant tensor. Raises RunTime if it is known only at run time."""
        if isinstance(x, torch.Tensor):
            return x
        raise NeedsRuntimeValues("an operand that must be constant is computed at run time")

    def dtype(self, element_type: int) -> torch.dtype:
        """The torch type of an ONNX element type."""
        return torch_dtype(element_type)

    def element_type(self, x: Value) -> int:
        """The ONNX type of an operand (FLOAT for those computed in fp32)."""
        return element_type(x)


def run_rule(call: Call, rule: Rule, operands: Sequence[Value]) -> tuple[Value, ...]:
    """Apply a rule to a node's operands; one value for each output. Raises Unsupported."""
    if (result := _on_host(call, operands)) is not NotImplemented:
        return (result,) if not isinstance(result, tuple) else result
    try:
        result = rule(call, *(call.tracer.to_tensor(operand) for operand in operands))
    except UnsupportedNode:
        raise
    except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, KeyError) as error:
        raise UnsupportedNode(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if unread := call.unread():
        raise UnsupportedNode(f"attribute {', '.join(unread)} is not implemented")
    return result if isinstance(result, tuple) else (result,)


def _on_host(call: Call, operands: Sequence[Value]) -> Value:
    rule = SHAPE_RULES.get(call.op)
    if rule is None or not any(isinstance(operand, np.ndarray) for operand in operands):
        return NotImplemented
    arrays: list[ShapeArray | None] = []
    for operand in operands:
        array = None if operand is None else call.tracer.shape_numbers(operand)
        if operand is not None and array is None:
            return NotImplemented
        arrays.append(array)
    return rule(call, *arrays)
