"""Rewrites of an imported graph into the calls torch has fast kernels for.

Each takes a graph that computes f and leaves one that computes f up to rounding. A rewrite looks at a
node and its operands only, and acts when every inner value has no other reader; what it leaves unread
is removed afterwards.

    matmul(x, W) + b                                       ->  linear(x, W.t(), b)
    softmax(mask(matmul(q, k.T) * scale)) [dropout] @ v    ->  scaled_dot_product_attention(q, k, v)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from trainer.ops.norm import Dropout
from trainer.ops.shape import arange

MASKED = -1e9
"""Scores at or below this have no weight after softmax, whatever is added to them."""


class Attention(nn.Module):
    """softmax(q k.T * scale + mask) v, its weights dropped out in training. Holds no weights of its own."""

    def __init__(self, *, scale: float, causal: bool, dropout: float) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.dropout = dropout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """query, key, value: [..., sequence, width]; mask: added to the scores [..., queries, keys]."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.causal, scale=self.scale
        )

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, causal={self.causal}, dropout={self.dropout:g}"


def fuse(graph: fx.Graph, root: nn.Module) -> dict[str, int]:
    """Apply every rewrite to a graph as the tracer left it; returns how often each applied."""
    counts = {"attention": 0, "linear": 0}
    for node in list(graph.nodes):
        if _calls(node, torch.matmul) and _attention(graph, root, node):
            counts["attention"] += 1
    for node in list(graph.nodes):
        if _calls(node, torch.add) and _linear(graph, root, node):
            counts["linear"] += 1
    return counts


def _calls(node: Any, *functions: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def _only(node: Any) -> bool:
    """A node one other node reads, so that it may vanish."""
    return isinstance(node, fx.Node) and len(node.users) == 1


def _rank(node: Any) -> int:
    """The number of dimensions the tracer noted."""
    return int(node.meta.get("rank", -1)) if isinstance(node, fx.Node) else -1


def _tensor(root: nn.Module, node: Any) -> torch.Tensor | None:
    """The stored tensor a node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, leaf = str(node.target).rpartition(".")
    tensor: torch.Tensor = getattr(root.get_submodule(owner), leaf)
    return tensor


# -- linear


def _linear(graph: fx.Graph, root: nn.Module, node: fx.Node) -> bool:
    """A stored 1-d bias added to a product with a stored matrix. Its orientation stays the file's."""
    for product, bias in (node.args, node.args[::-1]):
        stored = _tensor(root, bias)
        if not (_calls(product, torch.matmul) and _only(product) and stored is not None and stored.ndim == 1):
            continue
        assert isinstance(product, fx.Node)
        x, weight = product.args
        matrix = _tensor(root, weight)
        if matrix is None or matrix.ndim != 2 or stored.shape[0] != matrix.shape[1] or _rank(x) < 2:
            continue
        with graph.inserting_before(node):
            turned = graph.call_method("t", (weight,))
            node.replace_all_uses_with(graph.call_function(F.linear, (x, turned, bias)))
        return True
    return False


# -- attention


def _attention(graph: fx.Graph, root: nn.Module, node: fx.Node) -> bool:
    weights, value = node.args
    dropout = 0.0
    if _only(weights) and weights.op == "call_module":  # type: ignore[union-attr]
        module = root.get_submodule(str(weights.target))  # type: ignore[union-attr]
        if not isinstance(module, Dropout) or module.with_mask:
            return False
        dropout, weights = module.ratio, weights.args[0]  # type: ignore[union-attr]
    if not (_calls(weights, F.softmax) and _only(weights) and _rank(weights) == 4):
        return False
    assert isinstance(weights, fx.Node)
    if weights.kwargs.get("dim") not in (-1, 3):
        return False
    scores, mask, causal = _unmask(root, weights.args[0])
    scores, scale = _unscale(root, scores)
    if not (_calls(scores, torch.matmul) and _only(scores)):
        return False
    assert isinstance(scores, fx.Node)
    query, turned_key = scores.args
    if any(_rank(part) != 4 for part in (query, turned_key, value)):
        return False
    with graph.inserting_before(node):
        if isinstance(mask, _Chosen):
            mask = graph.call_function(additive_mask, (mask.condition, mask.otherwise, query))
        key = _turn_back(graph, turned_key)
        name, number = "attention", 0
        while hasattr(root, f"{name}_{number}"):
            number += 1
        root.add_module(f"{name}_{number}", Attention(scale=scale, causal=causal, dropout=dropout))
        operands = (query, key, value) if mask is None else (query, key, value, mask)
        node.replace_all_uses_with(graph.call_module(f"{name}_{number}", operands))
    return True


class _Chosen:
    """A mask that chooses between the scores and a number."""

    def __init__(self, condition: fx.Node, otherwise: float) -> None:
        self.condition = condition
        self.otherwise = otherwise


def additive_mask(condition: torch.Tensor, otherwise: float, like: torch.Tensor) -> torch.Tensor:
    """0 where the condition holds, `otherwise` elsewhere, in the type of `like`."""
    least = max(otherwise, torch.finfo(like.dtype).min)
    return torch.zeros((), dtype=like.dtype, device=like.device).where(condition, least)


def _unmask(root: nn.Module, node: Any) -> tuple[Any, Any, bool]:
    """(scores, mask, causal) of masked scores."""
    if _calls(node, torch.where) and _only(node):
        condition, scores, otherwise = node.args
        stored = _tensor(root, otherwise)
        otherwise = stored.item() if stored is not None and stored.numel() == 1 else otherwise
        if not isinstance(otherwise, float) or otherwise > MASKED:
            return node, None, False
        return (scores, None, True) if _is_causal(condition) else (scores, _Chosen(condition, otherwise), False)
    if _calls(node, torch.add) and _only(node) and isinstance(node.args[1], fx.Node):
        for scores, mask in (node.args, node.args[::-1]):
            if _calls(_unscale(root, scores)[0], torch.matmul):
                return scores, mask, False
    return node, None, False


def _is_causal(condition: Any) -> bool:
    """Whether a condition is: the position of the query, a row, is not before that of the key, a column."""
    if not _calls(condition, torch.ge):
        return False
    rows, columns = condition.args
    if not (_calls(rows, torch.unsqueeze) and _calls(columns, torch.unsqueeze)):
        return False
    positions = rows.args[0]
    return positions is columns.args[0] and _calls(positions, arange) and rows.args[1] == 1 and columns.args[1] == 0


def _unscale(root: nn.Module, node: Any) -> tuple[Any, float]:
    """(product, scale) of a product multiplied or divided by a number."""
    if _calls(node, torch.div, torch.mul) and _only(node):
        product, number = node.args
        stored = _tensor(root, number)
        number = stored.item() if stored is not None and stored.numel() == 1 and not stored.requires_grad else number
        if isinstance(number, float) and number:
            return product, 1.0 / number if node.target is torch.div else number
    return node, 1.0


def _turn_back(graph: fx.Graph, turned: Any) -> fx.Node:
    """The keys [..., sequence, width] of what was multiplied as [..., width, sequence]."""
    if isinstance(turned, fx.Node) and turned.op == "call_method" and turned.target == "permute":
        source, order = turned.args
        assert isinstance(order, list | tuple)
        return graph.call_method("permute", (source, [*order[:-2], order[-1], order[-2]]))
    return graph.call_method("transpose", (turned, -1, -2))
