"""The frame of all passes: find a pattern of calls in an fx graph and replace it by another one.

A rewrite is a function of a Rewriter and one node. It examines the node and its operands and returns a new node with
the same result, or raises NoMatch; then the graph is left unchanged. `Rewriter.apply` also checks that shape and type
of the new node are those of the old one at both trial sizes (tracing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from onward.trainer.onnx_import.lowering.node_origins import mark_fused
from onward.trainer.onnx_import.tracing.probed_calls import ProbedCalls, call_key, module_key
from onward.trainer.onnx_import.tracing.probing import TORCH_ERRORS, as_function

Rewrite = Callable[["Rewriter", fx.Node], fx.Node]


class NoMatch(Exception):
    """The node is not what the rewrite replaces."""


def require(condition: object) -> None:
    """Raise NoMatch unless the condition holds."""
    if not condition:
        raise NoMatch


def is_call(value: Any, *targets: Callable[..., Any] | str) -> bool:
    """Return whether a value is a call of one of these functions, or of tensor methods of these names."""
    return isinstance(value, fx.Node) and value.op in ("call_function", "call_method") and value.target in targets


def has_one_user(value: Any) -> bool:
    """Return whether exactly one node reads a value; the value is then removed together with its reader."""
    return isinstance(value, fx.Node) and len(value.users) == 1


class Rewriter:
    """A graph that is being rewritten, and the module that holds its tensors."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph = graph
        self.root = root
        self._made: list[fx.Node] = []
        self._erased: list[fx.Node] = []
        self._known_calls = ProbedCalls()
        self._next_number: dict[str, int] = {}
        """Prefix of a new module's name -> the first number that may be free."""

    # -- properties of a value

    def probes(self, value: Any) -> tuple[Any, Any]:
        """Return a value at the two trial sizes: meta tensors, or numbers. Raises NoMatch if they are not known."""
        if not isinstance(value, fx.Node):
            return value, value
        # kept in the node's meta data: several passes look at the same values
        if "probes" not in value.meta:
            value.meta["probes"] = self._probe(value)
        probes: tuple[Any, Any] | None = value.meta["probes"]
        if probes is None:
            raise NoMatch
        return probes

    def _probe(self, node: fx.Node) -> tuple[Any, Any]:
        # a stored tensor is the same at both trial sizes
        if node.op == "get_attr":
            probe = torch.empty_like(self._stored(node), device="meta", requires_grad=False)
            return probe, probe
        if node.op == "call_module":
            run: Any = self.root.get_submodule(str(node.target))
            key = module_key(run)
        elif node.op in ("call_method", "call_function"):
            target: Any = node.target
            run = as_function(target)
            key = call_key(target)
        else:
            raise NoMatch

        def of(side: int) -> Any:
            args, kwargs = map_aggregate((node.args, node.kwargs), lambda leaf: self.probes(leaf)[side])
            return self._known_calls.run(key, run, args, kwargs)

        try:
            return of(0), of(1)
        except (*TORCH_ERRORS, AttributeError) as error:
            raise NoMatch from error

    def shapes(self, value: Any) -> tuple[torch.Size, torch.Size]:
        """Return the shapes at the two trial sizes. Raises NoMatch if the value is not a tensor."""
        first, second = self.probes(value)
        require(isinstance(first, torch.Tensor))
        return first.shape, second.shape

    def static(self, value: Any) -> list[int | None]:
        """Return the shape, with None for dynamic dimensions."""
        return [a if a == b else None for a, b in zip(*self.shapes(value), strict=True)]

    def rank(self, value: Any) -> int:
        """Return the number of dimensions; -1 if it is unknown or the value is not a tensor."""
        try:
            return len(self.shapes(value)[0])
        except NoMatch:
            return -1

    def dtype(self, value: Any) -> torch.dtype:
        """Return the torch type of a tensor."""
        self.shapes(value)
        dtype: torch.dtype = self.probes(value)[0].dtype
        return dtype

    def _stored(self, node: fx.Node) -> torch.Tensor:
        tensor: torch.Tensor = attrgetter(str(node.target))(self.root)
        return tensor

    def constant(self, value: Any) -> torch.Tensor | None:
        """Return the tensor that a get_attr node reads if it is a constant, neither weight nor running statistic."""
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return None
        tensor = self._stored(value)
        owner, _, leaf = str(value.target).rpartition(".")
        # constants are registered non-persistent (tracing.py); persistent buffers are running statistics, which change
        fixed = leaf in self.root.get_submodule(owner)._non_persistent_buffers_set
        return tensor if fixed and not isinstance(tensor, nn.Parameter) else None

    def is_parameter(self, node: fx.Node) -> bool:
        """Return whether a node reads a weight."""
        return node.op == "get_attr" and isinstance(self._stored(node), nn.Parameter)

    def number(self, value: Any) -> float | None:
        """Return a Python number, or the element of a constant of one element, as float; else None."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        tensor = self.constant(value)
        if tensor is None or tensor.numel() != 1 or tensor.dtype == torch.bool:
            return None
        return float(tensor.item())

    def near(self, number: float | None, expected: float, like: Any) -> bool:
        """Return whether two numbers are equal up to rounding in the type of `like`."""
        dtype = self.dtype(like)
        require(dtype.is_floating_point)
        return number is not None and abs(number - expected) <= 2 * torch.finfo(dtype).eps * abs(expected)

    def factors(self, value: Any, *, root: bool = False) -> tuple[float, list[fx.Node]]:
        """Return a product as (number, other factors).

        A product with several readers counts as one factor, because it is computed anyway. root: except at the top.
        """
        if (number := self.number(value)) is not None:
            return number, []
        require(isinstance(value, fx.Node))
        if not (root or has_one_user(value)) or (product := self._product(value)) is None:
            return 1.0, [value]
        # nested products are one product, whatever their grouping
        number, operands = product
        nodes: list[fx.Node] = []
        for operand in operands:
            inner, more = self.factors(operand)
            number = number * inner
            nodes = nodes + more
        return number, nodes

    def _product(self, node: fx.Node) -> tuple[float, list[Any]] | None:
        """Return (number, factors) of one multiplication, division by a number, square or cube; else None."""
        if is_call(node, torch.mul):
            return 1.0, list(node.args)
        if is_call(node, torch.div) and len(node.args) == 2 and (divisor := self.number(node.args[1])):
            return 1.0 / divisor, [node.args[0]]
        if is_call(node, torch.pow) and (power := self.number(node.args[1])) in (2.0, 3.0):
            return 1.0, [node.args[0]] * int(power)
        return (1.0, [node.args[0], node.args[0]]) if is_call(node, torch.square) else None

    # -- changing the graph

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call before the node that is being replaced. Raises NoMatch if torch refuses it."""
        record = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        return self._new(record(function, args, kwargs))  # type: ignore[arg-type]

    def call_module(self, name: str, module: nn.Module, *args: Any) -> fx.Node:
        """Insert a call of a new module, registered as `name`_0, `name`_1, ..."""
        number = self._next_number.get(name, 0)
        while hasattr(self.root, f"{name}_{number}"):
            number += 1
        self._next_number[name] = number + 1
        self.root.add_module(f"{name}_{number}", module)
        return self._new(self.graph.call_module(f"{name}_{number}", args))

    def _new(self, node: fx.Node) -> fx.Node:
        self._made.append(node)
        first = self.probes(node)[0]
        if isinstance(first, torch.Tensor):
            node.meta["rank"] = first.ndim
        return node

    def apply(self, rewrite: Rewrite, *targets: Callable[..., Any] | str) -> int:
        """Try a rewrite at every call of these functions, in the order of the graph; return how many it replaced."""
        nodes = [node for node in self.graph.nodes if is_call(node, *targets)]
        # listed before: a rewrite erases nodes, and those that it makes are not tried again
        return sum(self._replaced(rewrite, node) for node in nodes if not node._erased)

    def _replaced(self, rewrite: Rewrite, node: fx.Node) -> bool:
        self._made = []
        self._erased = []
        try:
            with self.graph.inserting_before(node):
                new = rewrite(self, node)
            # a rewrite may overlook that an operand is broadcast or has another type; this finds it at both trial sizes
            require(self.shapes(new) == self.shapes(node) and self.dtype(new) == self.dtype(node))
        except NoMatch:  # a condition failed after new nodes were inserted: remove them again
            # the last one first: fx refuses to erase a node that has readers
            for made in reversed(self._made):
                self.graph.erase_node(made)
                if made.op == "call_module":
                    delattr(self.root, str(made.target))
                    self._next_number.clear()  # the number is free again
            return False
        # the new node computes the ONNX value of the old one; parallel.cuts names stages by these values
        if names := node.meta.get("onnx"):
            new.meta["onnx"] = (*new.meta.get("onnx", ()), *names)
        node.replace_all_uses_with(new)
        self.remove(node)
        mark_fused(self._made, new, node, self._erased)
        return True

    def remove(self, node: fx.Node) -> None:
        """Erase a node without readers, and then its operands that have no other readers."""
        if node.users or node._erased or node.op in ("placeholder", "output"):
            return
        operands = list(node.all_input_nodes)
        self.graph.erase_node(node)
        self._erased.append(node)
        for operand in operands:
            self.remove(operand)
