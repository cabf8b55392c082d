"""Replacing calls of an imported graph by others: what a rewrite may ask, and what is checked of its result.

A rewrite is a function that looks at one node and what it reads, and gives a node that computes the same.
It raises NoMatch where one of its conditions does not hold; then nothing is changed. Afterwards it is checked
that shape and type are the same, too, for both sizes at which the graph was traced (trainer/onnx_import/tracing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from onward.trainer.onnx_import.probing import TORCH_ERRORS

Rewrite = Callable[["Rewriter", fx.Node], fx.Node]


class NoMatch(Exception):
    """The node is not what the rewrite replaces."""


def require(condition: object) -> None:
    """Raises NoMatch unless the condition holds."""
    if not condition:
        raise NoMatch


def is_call(value: Any, *targets: Callable[..., Any] | str) -> bool:
    """Whether a value is the result of one of these functions, or of the tensor methods of these names."""
    return isinstance(value, fx.Node) and value.op in ("call_function", "call_method") and value.target in targets


def has_one_user(value: Any) -> bool:
    """Whether one other node reads it, so that it vanishes when that one does."""
    return isinstance(value, fx.Node) and len(value.users) == 1


class Rewriter:
    """A graph, and the module that holds its tensors, while it is rewritten."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.graph = graph
        self.root = root
        self._made: list[fx.Node] = []

    # -- what is known of a value

    def probes(self, value: Any) -> tuple[Any, Any]:
        """What a value is at each of the two sizes: meta tensors, or numbers. Raises NoMatch if that is not known."""
        if not isinstance(value, fx.Node):
            return value, value
        if "probes" not in value.meta:
            value.meta["probes"] = self._probe(value)
        probes: tuple[Any, Any] | None = value.meta["probes"]
        if probes is None:
            raise NoMatch
        return probes

    def _probe(self, node: fx.Node) -> tuple[Any, Any]:
        if node.op == "get_attr":
            probe = torch.empty_like(self._stored(node), device="meta", requires_grad=False)
            return probe, probe
        if node.op == "call_module":
            run: Any = self.root.get_submodule(str(node.target))
        elif node.op == "call_method":

            def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return getattr(tensor, str(node.target))(*args, **kwargs)

        elif node.op == "call_function":
            run = node.target
        else:
            raise NoMatch

        def of(side: int) -> Any:
            args, kwargs = pytree.tree_map(lambda leaf: self.probes(leaf)[side], (node.args, node.kwargs))
            with torch.no_grad():
                return run(*args, **kwargs)

        try:
            return of(0), of(1)
        except (*TORCH_ERRORS, AttributeError) as error:
            raise NoMatch from error

    def shapes(self, value: Any) -> tuple[torch.Size, torch.Size]:
        """The shape at each of the two sizes. Raises NoMatch for what is no tensor."""
        first, second = self.probes(value)
        require(isinstance(first, torch.Tensor))
        return first.shape, second.shape

    def static(self, value: Any) -> list[int | None]:
        """The shape, None in place of what depends on the sizes of the inputs."""
        return [a if a == b else None for a, b in zip(*self.shapes(value), strict=True)]

    def rank(self, value: Any) -> int:
        """The number of dimensions; -1 of what is no tensor or not known."""
        try:
            return len(self.shapes(value)[0])
        except NoMatch:
            return -1

    def dtype(self, value: Any) -> torch.dtype:
        """The type of a tensor."""
        self.shapes(value)
        dtype: torch.dtype = self.probes(value)[0].dtype
        return dtype

    def _stored(self, node: fx.Node) -> torch.Tensor:
        owner, _, leaf = str(node.target).rpartition(".")
        tensor: torch.Tensor = getattr(self.root.get_submodule(owner), leaf)
        return tensor

    def constant(self, value: Any) -> torch.Tensor | None:
        """The tensor a node reads if nothing ever changes it: no weight and no running statistic."""
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return None
        tensor = self._stored(value)
        owner, _, leaf = str(value.target).rpartition(".")
        fixed = leaf in self.root.get_submodule(owner)._non_persistent_buffers_set
        return tensor if fixed and not isinstance(tensor, nn.Parameter) else None

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether a node reads a weight."""
        return node.op == "get_attr" and isinstance(self._stored(node), nn.Parameter)

    def number(self, value: Any) -> float | None:
        """A Python number, or that in a constant of one element."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        tensor = self.constant(value)
        if tensor is None or tensor.numel() != 1 or tensor.dtype == torch.bool:
            return None
        return float(tensor.item())

    def near(self, number: float | None, expected: float, like: Any) -> bool:
        """Whether two numbers are one in the type of `like`."""
        dtype = self.dtype(like)
        require(dtype.is_floating_point)
        return number is not None and abs(number - expected) <= 2 * torch.finfo(dtype).eps * abs(expected)

    def factors(self, value: Any, *, root: bool = False) -> tuple[float, list[fx.Node]]:
        """A product as its number and its other factors. What others read too is a factor, unless it is the root."""
        if (number := self.number(value)) is not None:
            return number, []
        require(isinstance(value, fx.Node))
        if not (root or has_one_user(value)) or (product := self._product(value)) is None:
            return 1.0, [value]
        number, operands = product
        nodes: list[fx.Node] = []
        for operand in operands:
            inner, more = self.factors(operand)
            number, nodes = number * inner, nodes + more
        return number, nodes

    def _product(self, node: fx.Node) -> tuple[float, list[Any]] | None:
        """(number, factors) of one multiplication, division by a number or small power."""
        if is_call(node, torch.mul):
            return 1.0, list(node.args)
        if is_call(node, torch.div) and len(node.args) == 2 and (divisor := self.number(node.args[1])):
            return 1.0 / divisor, [node.args[0]]
        if is_call(node, torch.pow) and (power := self.number(node.args[1])) in (2.0, 3.0):
            return 1.0, [node.args[0]] * int(power)
        return (1.0, [node.args[0], node.args[0]]) if is_call(node, torch.square) else None

    # -- changing the graph

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call, before the node that is being replaced. Raises NoMatch where torch refuses it."""
        record = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        return self._new(record(function, args, kwargs))  # type: ignore[arg-type]

    def call_module(self, name: str, module: nn.Module, *args: Any) -> fx.Node:
        """The same of a new module, hung on the root as `name`_0, `name`_1, ..."""
        number = 0
        while hasattr(self.root, f"{name}_{number}"):
            number += 1
        self.root.add_module(f"{name}_{number}", module)
        return self._new(self.graph.call_module(f"{name}_{number}", args))

    def _new(self, node: fx.Node) -> fx.Node:
        self._made.append(node)
        first = self.probes(node)[0]
        if isinstance(first, torch.Tensor):
            node.meta["rank"] = first.ndim
        return node

    def apply(self, rewrite: Rewrite, *targets: Callable[..., Any] | str) -> int:
        """Try a rewrite at every call of these functions, first to last; returns how many it replaced."""
        nodes = [node for node in self.graph.nodes if is_call(node, *targets)]
        return sum(self._replaced(rewrite, node) for node in nodes if not node._erased)

    def _replaced(self, rewrite: Rewrite, node: fx.Node) -> bool:
        self._made = []
        try:
            with self.graph.inserting_before(node):
                new = rewrite(self, node)
            require(self.shapes(new) == self.shapes(node) and self.dtype(new) == self.dtype(node))
        except NoMatch:
            for made in reversed(self._made):
                self._take_off(made)
            return False
        if names := node.meta.get("onnx"):
            new.meta["onnx"] = (*new.meta.get("onnx", ()), *names)
        node.replace_all_uses_with(new)
        self.remove(node)
        return True

    def _take_off(self, node: fx.Node) -> None:
        self.graph.erase_node(node)
        if node.op == "call_module":
            delattr(self.root, str(node.target))

    def remove(self, node: fx.Node) -> None:
        """Erase a node that nothing reads, and what only it read."""
        if node.users or node._erased or node.op in ("placeholder", "output"):
            return
        operands = list(node.all_input_nodes)
        self.graph.erase_node(node)
        for operand in operands:
            self.remove(operand)
