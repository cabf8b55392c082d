"""Rewrites that remove work: calls made twice, matrix products and their bias, dimensions merged and split again.

f(x), f(x)                                     ->  f(x)                    for functions that draw no random numbers
matmul(x, W) + b                               ->  linear(x, W.t(), b)
reshape(linear(reshape(x, [-1, k]), W), ...)   ->  linear(x, W)            where x has these dimensions anyway
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils import _pytree as pytree

from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, has_one_user, is_call, require

RANDOM = frozenset(
    {"dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "bernoulli", "rrelu",
     "multinomial", "normal", "poisson", "gumbel_softmax", "rand", "rand_like", "randint", "randint_like", "randn",
     "randn_like", "randperm", "scaled_dot_product_attention", "empty", "empty_like", "batch_norm"}
)  # fmt: skip
"""Names of functions two calls of which differ, or that change what they read."""

KNOWN = ("torch.", "onward.trainer.onnx_import.ops.", "_operator.", "builtins.", "None.")
"""Where functions come from that are known to do nothing else; torch's own often do not say."""


def share_equal_calls(r: Rewriter) -> int:
    """Let equal calls be one; returns how many were removed."""
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(r.graph.nodes):
        key = _key(r, node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            r.graph.erase_node(node)
            count += node.op != "get_attr"
    return count


def _key(r: Rewriter, node: Any) -> Any:
    """What two nodes of one value have in common; None if nothing can tell."""
    if node.op == "get_attr":
        tensor = r.constant(node)
        if tensor is None or tensor.numel() > 4096:
            return ("get_attr", node.target)
        flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # an expanded constant has stride 0
        return ("constant", tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())
    if not _is_pure(r, node):
        return None
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    # 1, 1.0 and True are equal but not the same
    return node.op, node.target, str(spec), tuple((type(leaf), _exact(leaf)) for leaf in leaves)


def _exact(leaf: Any) -> Any:
    return leaf.hex() if isinstance(leaf, float) else leaf


def _is_pure(r: Rewriter, node: Any) -> bool:
    """Whether the value depends on the operands alone, and the operands stay as they are while the graph runs.

    Of functions, those of torch and of the operator table: a user's own may do anything.
    """
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(target) if node.op == "call_method" else target.__name__
    known = node.op == "call_method" or f"{target.__module__}.".startswith(KNOWN)
    pure = known and name not in RANDOM and not name.endswith("_")
    return pure and not any(_changes(r, operand) for operand in node.all_input_nodes)


def _changes(r: Rewriter, node: Any) -> bool:
    """Whether a node reads a running statistic."""
    return node.op == "get_attr" and r.constant(node) is None and not r.is_parameter(node)


# -- linear


def fuse_linears(r: Rewriter) -> int:
    """Fuse products with a matrix and their bias; returns how many."""
    count = r.apply(_linear, torch.add)
    r.apply(_unflattened, "reshape", "view")
    return count


def _linear(r: Rewriter, node: Any) -> fx.Node:
    """A 1-d bias added to a product with a matrix. Its orientation stays the file's."""
    require(len(node.args) == 2 and not node.kwargs)
    for product, bias in (node.args, node.args[::-1]):
        if not (is_call(product, torch.matmul) and has_one_user(product) and isinstance(bias, fx.Node)):
            continue
        x, weight = product.args
        if r.rank(weight) != 2 or r.rank(bias) != 1 or r.rank(x) < 2 or r.static(bias)[0] is None:
            continue
        if r.static(bias)[0] == r.static(weight)[1] and r.dtype(bias) == r.dtype(weight) == r.dtype(x):
            return r.call(F.linear, x, r.call("t", weight), bias)
    raise NoMatch


def _unflattened(r: Rewriter, node: Any) -> fx.Node:
    """A linear layer on rows, whose dimensions are merged before and split again behind it."""
    linear = node.args[0]
    require(is_call(linear, F.linear) and has_one_user(linear))
    flat, *rest = linear.args
    require(is_call(flat, "reshape", "view") and r.rank(flat) == 2 and r.rank(flat.args[0]) > 2)
    x = flat.args[0]
    for source, rows in zip(r.shapes(x), r.shapes(flat), strict=True):
        require(source[-1] == rows[-1])
    return r.call(F.linear, x, *rest)
