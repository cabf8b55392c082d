"""The registry of operator rules: `@lower` registers a function for an ONNX operator and some of its versions.

    @lower("Gelu", since=(20,))
    def gelu(c: Call, x: Value) -> Value:
        return c(F.gelu, x, approximate=c.attr("approximate", "none"))

`c(f, ...)` records a call of f on the fx graph if an operand is traced, and computes f at once if all are constants.
The same rule therefore builds graphs, folds constants and runs eagerly. A rule that needs a value that is known only
when the graph runs raises `NeedsRuntimeValues` (the methods of `Call` do); it is then called again with real tensors
each time the graph runs. A version that is not registered, an operand that the function does not take and an attribute
that it did not read are refused with a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from onward.trainer.errors import UnsupportedNode
from onward.trainer.onnx_graph.beyond_onnx import is_note_of_a_tool
from onward.trainer.onnx_graph.files.element_types import torch_dtype
from onward.trainer.onnx_graph.files.index import attribute_value
from onward.trainer.onnx_graph.files.operators import name_of
from onward.trainer.onnx_import.fixed_batch.batch_constants import fit_operands
from onward.trainer.onnx_import.lowering.integer_storage import move_before_storage
from onward.trainer.onnx_import.roles.role_tables import MOVES
from onward.trainer.onnx_import.tracing.eager import EagerTracer
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Traced, Value, element_type

Rule = Callable[..., Value]
Function = Callable[..., Any]
RunBody = Callable[[onnx.GraphProto, Sequence[Value]], list[Value]]

RULES: dict[tuple[str, int], Rule] = {}
"""(operator, since_version) -> its rule; operators of other domains than ONNX's are named "domain.operator"."""

SHAPE_RULES: dict[str, Rule] = {}
"""Operator -> its rule for ShapeArrays (ops/shape_arithmetic.py)."""


def lower(*operators: str, since: Sequence[int]) -> Callable[[Rule], Rule]:
    """Register a rule for operators. since: the opsets in which ONNX changed them and whose meaning the rule has."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            for version in since:
                # otherwise the order of imports would decide which rule is used
                assert (operator, version) not in RULES, f"{operator}-{version} has two rules"
                RULES[operator, version] = rule
        return rule

    return register


def lower_each(table: Mapping[str, tuple[Function, tuple[int, ...]]], rule_of: Callable[[Function], Rule]) -> None:
    """Register the rule of each function of a table: operator -> (function of torch, versions of ONNX)."""
    for operator, (function, since) in table.items():
        lower(operator, since=since)(rule_of(function))


def shape_rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for ShapeArrays; it may return NotImplemented, and the ordinary rule is then called."""

    def register(rule: Rule) -> Rule:
        SHAPE_RULES.update(dict.fromkeys(operators, rule))
        return rule

    return register


class Call:
    """The first argument of a rule: the node's attributes and version, and `c(f, ...)` to call torch with."""

    def __init__(
        self,
        node: onnx.NodeProto,
        version: int,
        tracer: Tracer,
        *,
        run_body: RunBody | None = None,
    ) -> None:
        self.op = node.op_type
        self.version = version
        self.tracer = tracer
        self.batch = tracer.batch
        """The batch that the file declares as fixed, if it is treated as dynamic (batch_constants.py)."""
        self.num_outputs = len(node.output)
        self.name = name_of(node)
        self._node = node
        self._attributes = {attribute.name: attribute for attribute in node.attribute}
        self._read: set[str] = set()
        self._run_body = run_body

    def __call__(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Value:
        return self.tracer.call(function, *args, **kwargs)

    def module(self, module: nn.Module, *args: Any) -> Value:
        """Call a module that follows train() and eval(), registered under the node's name."""
        return self.tracer.call_module(self._node.name or self._node.output[0] or self.op, module, *args)

    @property
    def eager(self) -> bool:
        """Return whether calls compute with real tensors now; otherwise they are recorded on a graph."""
        return isinstance(self.tracer, EagerTracer)

    @property
    def output_name(self) -> str:
        """Return the name of the node's first output."""
        return str(self._node.output[0])

    @property
    def trial_batch(self) -> tuple[int, int] | None:
        """Return the numbers of rows of the two trial sizes; None without a graph, or if no input has a known shape."""
        for node in self.tracer.graph.find_nodes(op="placeholder"):
            if (probes := node.meta.get("probes")) and probes[0].ndim:
                return len(probes[0]), len(probes[1])
        return None

    def body(self, name: str, inputs: Sequence[Value]) -> list[Value]:
        """Lower the inner graph in an attribute, for these inputs, and return its results."""
        assert self._run_body is not None, "only GraphLowering can run inner graphs"
        return self._run_body(self.attr(name), inputs)

    # -- attributes

    def attr(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, or `default` if the node does not have it."""
        # what is read here is implemented; `unread` finds the rest
        self._read.add(name)
        return attribute_value(self._attributes[name]) if name in self._attributes else default

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse an attribute whose value is none of those allowed; the first allowed one is ONNX's default."""
        value = self.attr(name, allowed[0])
        if value not in allowed:
            raise UnsupportedNode(f"{name}={value!r} is not implemented (only {', '.join(map(repr, allowed))})")

    def unread(self) -> list[str]:
        """Return the attributes that the rule has not read, and therefore does not implement."""
        return sorted(name for name in set(self._attributes) - self._read if not is_note_of_a_tool(name))

    def wants(self, output: int) -> bool:
        """Return whether the node has this output; an output with an empty name is left out."""
        return output < len(self._node.output) and bool(self._node.output[output])

    # -- values

    def size(self, x: Value, dim: int) -> Value:
        """Return the length of a dimension: an int, or a traced int if it is dynamic."""
        return self.tracer.size(x, dim)

    def sizes(self, x: Value) -> list[Value]:
        """Return the lengths of all dimensions."""
        return [self.tracer.size(x, dim) for dim in range(x.ndim)]

    def ints(self, x: Value) -> list[Value]:
        """Return the integers of a 0-d or 1-d operand. Raises NeedsRuntimeValues if they depend on data."""
        array = self.tracer.shape_ints(x)
        if array is None:
            raise NeedsRuntimeValues("an operand that must be a constant or a shape is computed at run time")
        return [length if isinstance(length, Traced) else int(length) for length in array.reshape(-1)]

    def axis(self, x: Value, axis: int) -> int:
        """Return an axis as a non-negative number."""
        if not -x.ndim <= axis <= max(x.ndim - 1, 0):
            raise UnsupportedNode(f"axis {axis} is outside a tensor of {x.ndim} dimensions")
        return int(axis % max(x.ndim, 1))

    def axes(self, given: Value) -> list[int] | None:
        """Return the axes, from the attribute of older versions or the operand of newer ones; None without both."""
        if given is None:
            attribute = self.attr("axes")
            return None if attribute is None else list(attribute)
        return [int(axis) for axis in self.ints(given)]

    def number(self, x: Value) -> float | int | bool:
        """Return a constant of one element as a Python number. Raises NeedsRuntimeValues if it is not a constant."""
        if isinstance(x, torch.Tensor) and x.numel() == 1:
            return x.item()
        raise NeedsRuntimeValues("an operand that must be a constant number is computed at run time")

    def constant(self, x: Value) -> torch.Tensor:
        """Return the operand if it is a constant tensor. Raises NeedsRuntimeValues if it is not."""
        if isinstance(x, torch.Tensor):
            return x
        raise NeedsRuntimeValues("an operand that must be constant is computed at run time")

    def dtype(self, element_type: int) -> torch.dtype:
        """Return the torch type of an ONNX element type."""
        return torch_dtype(element_type)

    def element_type(self, x: Value) -> int:
        """Return the ONNX type of an operand (FLOAT for half precision, which is computed in fp32)."""
        return element_type(x)


def run_rule(call: Call, rule: Rule, operands: Sequence[Value]) -> tuple[Value, ...]:
    """Call a rule on a node's operands; return one value for each output. Raises UnsupportedNode."""
    try:
        if (result := _apply_shape_rule(call, operands)) is not NotImplemented:
            return (result,) if not isinstance(result, tuple) else result
        # from here on shape arithmetic is a tensor like any other
        tensors = fit_operands(call, [call.tracer.to_tensor(operand) for operand in operands])
        result = NotImplemented
        # what only moves elements runs on the floats before storage, so that gradients pass (integer_storage.py)
        if call.op in MOVES and not call.eager:
            result = move_before_storage(functools.partial(rule, call), tensors)
        if result is NotImplemented:
            result = rule(call, *tensors)
    except UnsupportedNode:
        raise
    except (RuntimeError, NotImplementedError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UnsupportedNode(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if unread := call.unread():
        raise UnsupportedNode(f"attribute {', '.join(unread)} is not implemented")
    return result if isinstance(result, tuple) else (result,)


def _apply_shape_rule(call: Call, operands: Sequence[Value]) -> Value:
    # only if an operand comes from shape arithmetic; otherwise integer tensors are ordinary data
    rule = SHAPE_RULES.get(call.op)
    if rule is None or not any(isinstance(operand, np.ndarray) for operand in operands):
        return NotImplemented
    arrays = [call.tracer.shape_numbers(operand) for operand in operands]
    if any(array is None and operand is not None for array, operand in zip(arrays, operands, strict=True)):
        return NotImplemented
    return rule(call, *arrays)
