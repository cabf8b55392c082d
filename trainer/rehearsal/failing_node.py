"""Name the tensor of the ONNX graph that was being computed, or differentiated, when an error was raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from onward.trainer.onnx_import.imported_graph import ImportedGraph


class _NodeByNode(fx.Interpreter):
    """Run a graph one node after the other, and keep the one that computes, forward or backward, in `current`."""

    def __init__(self, module: ImportedGraph) -> None:
        super().__init__(module)
        self.current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        result = super().run_node(n)
        if n.op != "output":
            for tensor in tree_leaves(result):
                # called when the backward pass reaches the operation that computed the tensor
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _, node=n: self._reached(node))
        return result

    def _reached(self, node: fx.Node) -> None:
        self.current = node


def failing_node(module: ImportedGraph, attempt: Callable[[Callable[..., Any]], object]) -> str:
    """Return the name of the tensor at which `attempt` fails; "" if it does not fail in the graph.

    attempt: takes what to call in place of the module, and repeats what failed.
    """
    interpreter = _NodeByNode(module)
    try:
        attempt(interpreter.run)
    except Exception:  # the error is known; only the place is asked for
        return _tensor_name(interpreter.current)
    return ""


def _tensor_name(node: fx.Node | None) -> str:
    """Return the ONNX tensor that a node computes; where it computes none, the nearest one after it."""
    while node is not None and node.op != "root":
        if names := node.meta.get("onnx"):
            return str(names[0])
        node = node.next
    return ""
