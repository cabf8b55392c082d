"""Remove repeated calls, and fuse matrix products with their bias.

f(x), f(x)                                     ->  f(x)                    unless f draws random numbers
matmul(x, W) + b                               ->  linear(x, W.t(), b)
reshape(linear(reshape(x, [-1, k]), W), ...)   ->  linear(x, W)            if the result has the dimensions of x
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.passes.rewriter import NoMatch, Rewriter, has_one_user, is_call, require
from onward.trainer.onnx_import.tracing.probed_calls import PURE_MODULES, CannotCompareError, exact_key

RANDOM = frozenset(
    {"dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "bernoulli", "rrelu",
     "multinomial", "normal", "poisson", "gumbel_softmax", "rand", "rand_like", "randint", "randint_like", "randn",
     "randn_like", "randperm", "scaled_dot_product_attention", "empty", "empty_like", "batch_norm"}
)  # fmt: skip
"""Names of functions that draw random numbers or change their operands."""


def share_equal_calls(r: Rewriter) -> int:
    """Replace each call by an equal earlier one; return how many calls were removed."""
    seen: dict[Any, fx.Node] = {}
    count = 0
    # in the order of the graph: operands have been replaced by then, so equal calls of equal calls have equal keys
    for node in list(r.graph.nodes):
        key = _key(r, node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            r.graph.erase_node(node)
            if node.op != "get_attr":  # a read of a tensor is not a call
                count += 1
    return count


def _key(r: Rewriter, node: Any) -> Any:
    """Return a key that is equal for nodes of equal values; None if there is no such key."""
    if node.op == "get_attr":
        tensor = r.constant(node)
        if tensor is None or tensor.numel() > 4096:
            return ("get_attr", node.target)
        flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # view needs a contiguous tensor
        return ("constant", tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())
    if not _is_pure(r, node):
        return None
    try:
        return node.op, node.target, exact_key(node.args), exact_key(dict(node.kwargs))
    except CannotCompareError:
        return None


def _is_pure(r: Rewriter, node: Any) -> bool:
    """Return whether a call depends on its operands alone, and the operands do not change while the graph runs.

    Only functions of torch and of the operator rules are accepted; a user's function may have side effects.
    """
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return False
    # a method of a tensor is torch's own, whatever its name
    name = str(target) if node.op == "call_method" else target.__name__
    known = node.op == "call_method" or f"{target.__module__}.".startswith(PURE_MODULES)
    # torch's in-place functions end with an underscore
    pure = known and name not in RANDOM and not name.endswith("_")
    return pure and not any(_reads_running_statistic(r, operand) for operand in node.all_input_nodes)


def _reads_running_statistic(r: Rewriter, node: Any) -> bool:
    """Return whether a node reads a running statistic, which changes during training."""
    return node.op == "get_attr" and r.constant(node) is None and not r.is_parameter(node)


# -- linear


def fuse_linears(r: Rewriter) -> int:
    """Fuse products with a matrix and their bias; return how many."""
    count = r.apply(_linear, torch.add)
    r.apply(_without_flattening, "reshape", "view")
    return count


def _linear(r: Rewriter, node: Any) -> fx.Node:
    """Rewrite the addition of a 1-d bias to a product with a matrix. The weight keeps the file's layout [in, out]."""
    require(len(node.args) == 2 and not node.kwargs)
    for product, bias in (node.args, node.args[::-1]):
        if not (is_call(product, torch.matmul) and has_one_user(product) and isinstance(bias, fx.Node)):
            continue
        x, weight = product.args
        # a linear layer reads rows x [..., rows, in], one matrix [in, out] and a bias [out]
        if r.rank(weight) != 2 or r.rank(bias) != 1 or r.rank(x) < 2:
            continue
        (length,) = r.static(bias)
        # an operand of one element would broadcast in the addition: it is not a bias of a linear layer
        fits = length is not None and length == r.static(weight)[1]
        if fits and r.dtype(bias) == r.dtype(weight) == r.dtype(x):
            return r.call(F.linear, x, r.call("t", weight), bias)
    raise NoMatch


def _without_flattening(r: Rewriter, node: Any) -> fx.Node:
    """Rewrite a linear layer whose leading dimensions are merged before it and split again after it."""
    linear = node.args[0]
    require(is_call(linear, F.linear) and has_one_user(linear))
    # reshape(-1, k) in front and reshape(..., n) behind: F.linear takes any number of leading dimensions
    flat, *rest = linear.args
    require(is_call(flat, "reshape", "view") and r.rank(flat) == 2 and r.rank(flat.args[0]) > 2)
    x = flat.args[0]
    # the shape of the new result is compared by Rewriter.apply; here, that the first reshape keeps the features
    # together
    for source, rows in zip(r.shapes(x), r.shapes(flat), strict=True):
        require(source[-1] == rows[-1])
    return r.call(F.linear, x, *rest)
