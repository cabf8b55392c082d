"""How a divided dimension goes through calls that compute: one rule for each kind of call.

Each looks at a call with a divided operand and says which dimension of its result is divided, what else the call needs
(a part of an operand, a length of its own in an argument), or why it cannot be.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.ops.attention import rotate
from onward.trainer.onnx_import.ops.elementwise import hard_sigmoid, scaled_elu, shrink, swish
from onward.trainer.onnx_import.ops.norm import BatchNorm, Dropout, instance_norm, rms_norm
from onward.trainer.onnx_import.ops.random import StochasticDepth
from onward.trainer.onnx_import.ops.reduce import (
    reduce_l1,
    reduce_l2,
    reduce_log_sum,
    reduce_log_sum_exp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_product,
    reduce_sum,
    reduce_sum_square,
)
from onward.trainer.onnx_import.passes.attention import Attention, nan_where_empty, without_empty_rows
from onward.trainer.parallel.tensor.graph_analysis import CONVOLUTIONS, TRANSPOSED, Division, Product, Whole
from onward.trainer.parallel.tensor.propagation import Attempt, called, rule

# -- element by element

# fmt: off
ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atanh", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "contiguous", "cos", "cosh",
    "detach", "div", "elu", "eq", "erf", "exp", "float", "floor", "fmod", "ge", "gelu", "gt", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "isinf", "isnan", "le", "leaky_relu", "log", "log1p", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mish", "mul",
    "ne", "neg", "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "selu", "sigmoid", "sign",
    "silu", "sin", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "tan", "tanh", "tanhshrink",
    "threshold", "to", "truediv", "where", "zeros_like", "ones_like",
)
# fmt: on


@rule(
    *(getattr(owner, name) for name in ELEMENTWISE for owner in (torch, F, operator) if hasattr(owner, name)),
    *ELEMENTWISE,
    *(hard_sigmoid, scaled_elu, shrink, swish),
)
def elementwise(t: Attempt, node: Any) -> Division:
    """Operands broadcast; the result is divided as they are."""
    return t.aligned(node, t.tensors(node), t.rank(node))


@rule(Dropout)
def dropout(t: Attempt, node: Any) -> Division:
    if t.facts.submodule(node).with_mask:
        raise Whole(f"the mask of {node.name} is read, too")
    t.work.apart.append(node.name)
    return elementwise(t, node)


@rule(StochasticDepth)
def stochastic_depth(t: Attempt, node: Any) -> Division:
    """A sample is dropped on all ranks or on none: but for its channels, each has its own."""
    division = elementwise(t, node)
    if division.dim < t.facts.submodule(node).whole:
        t.work.apart.append(node.name)
    return division


# -- products


@rule(F.linear, torch.addmm)
def linear(t: Attempt, node: Any) -> Any:
    product = t.facts.products.get(node)
    if product is None:
        raise Whole(f"{node.name} multiplies by a matrix that is computed")
    division = t.division(product.x)
    if division is None or t.division(product.bias) is not None:
        raise Whole(f"{node.name} adds a divided value")
    return row(t, product, division) if division.dim == t.rank(product.x) - 1 else apart(t, product, division)


def row(t: Attempt, product: Product, division: Division) -> Any:
    """The product that adds up the parts: its result is whole."""
    rows = t.facts.tensor(product.row_path).shape[product.inputs]
    if rows != division.period:
        raise Whole(f"{product.name} has {rows} rows, of which {division.period} repeat")
    t.part(product.node, product.row_path, division.moved(product.inputs))
    t.rows.append(product)
    t.work.rows.append(product.node.name)


def apart(t: Attempt, product: Product, division: Division) -> Division:
    """Each part is multiplied by the whole matrix: the divided dimension is not the product's own."""
    for whole in (*product.others, product.bias):
        if isinstance(whole, fx.Node):
            t.enter(whole)
    return division


@rule(torch.matmul, torch.mm, torch.bmm)
def matmul(t: Attempt, node: Any) -> Any:
    if node in t.facts.products:
        return linear(t, node)
    a, b = node.args
    ranks, rank = (t.rank(a), t.rank(b)), t.rank(node)
    if min(ranks) < 2:
        raise Whole(f"{node.name} multiplies by a vector")
    places = [None if (own := t.division(x)) is None else n - own.dim for x, n in zip((a, b), ranks, strict=True)]
    if places[0] == 1 or places[1] == 2:
        raise Whole(f"{node.name} adds up products along the divided dimension")
    if places[0] == 2 or places[1] == 1:  # rows of the one, columns of the other: each is the result's own dimension
        if None not in places:
            raise Whole(f"two dimensions of {node.name} would be divided")
        own, other, last = (t.division(a), b, 2) if places[1] is None else (t.division(b), a, 1)
        assert own is not None
        t.enter(other)
        return own.moved(rank - last)
    return t.aligned(node, [a, b], rank)


@rule(*CONVOLUTIONS, *TRANSPOSED)
def convolution(t: Attempt, node: Any) -> Any:
    product = t.facts.products.get(node)
    if product is None:
        raise Whole(f"{node.name} convolves with a kernel that is computed")
    division = t.division(product.x)
    if t.division(product.bias) is not None:
        raise Whole(f"{node.name} adds a divided value")
    if division is None or division.dim > 1:
        raise Whole(f"{node.name} convolves along the divided dimension")
    if division.dim == 0:
        return apart(t, product, division)
    return row(t, product, division) if product.groups == 1 else grouped(t, product, division)


def grouped(t: Attempt, product: Product, division: Division) -> Division:
    """Each rank has whole groups: of single channels, or as many as divide evenly."""
    channels, groups = division.period, product.groups
    _once(t, product.node, product.x)
    if product.outputs:
        raise Whole(f"{product.node.name} is a transposed convolution in {groups} groups")
    outputs = t.facts.tensor(product.path).shape[0]
    if groups == channels:
        own, after = division, outputs // groups
    elif len(division.blocks) == 1 and division.even(t.size) and groups % t.size == 0:
        own, after = Division(1, (groups,)), outputs // groups
    else:
        raise Whole(f"{product.node.name} has {groups} groups of {channels} channels, over {t.size} ranks")
    result = replace(own, inner=own.inner * after, unit=own.unit if after == 1 else 0)
    t.part(product.node, product.path, result.moved(0))
    if isinstance(product.bias, fx.Node):
        t.operand(product.node, product.bias, 0, result)
    t.length(product.node, (6,), own)
    return result


# -- attention


@rule(Attention, F.scaled_dot_product_attention)
def attention(t: Attempt, node: Any) -> Division:
    query, key, value, *rest = node.args
    mask = rest[0] if rest else node.kwargs.get("attn_mask")
    if node.op == "call_module":
        if t.facts.submodule(node).dropout > 0:
            t.work.apart.append(node.name)
    elif node.kwargs.get("dropout_p") or len(rest) > 1:
        raise Whole(f"{node.name} drops out weights in another way than Attention")
    rank = t.rank(query)
    at, heads = next(
        (own.dim - t.rank(x), own) for x in (query, key, value, mask) if (own := t.division(x)) is not None
    )
    if at >= -2:
        raise Whole(f"{node.name} would be divided along dimension {rank + at} of {rank}, not by heads")
    for operand in (query, key, value):
        _heads(t, node, operand, rank + at, heads)
    if (own := t.division(query)) is None:
        raise Whole(f"the query of {node.name} is the same for all heads")
    for other in (t.division(key), t.division(value)):
        if other is not None and other.period == own.period:
            t.same(own, other, node)
        elif other is not None and not _beside(own, other, t.size):
            raise Whole(f"{node.name}: {own.period} heads share {other.period}, not evenly over {t.size} ranks")
    if isinstance(mask, fx.Node):
        _mask(t, node, mask, at, own)
    t.work.attends = True
    return own


def _beside(heads: Division, shared: Division, size: int) -> bool:
    """Whether each rank has just those heads of the query that share its heads of key or value."""
    times = heads.period // shared.period
    blocks = [block * heads.inner for block in heads.blocks]
    return (
        [block * shared.inner * times for block in shared.blocks] == blocks and shared.even(size) and heads.even(size)
    )


def _heads(t: Attempt, node: fx.Node, operand: fx.Node, at: int, heads: Division) -> None:
    """Query, key or value: divided by heads, or one head for all, or to be divided."""
    own = t.division(operand)
    if own is None:
        lengths = t.shapes(operand)[at]
        shared = lengths != (1, 1) and any(length % heads.period for length in lengths)  # or samples x heads
        few = Division(at, lengths[:1])
        if shared and not _beside(heads, few, t.size):
            share = f"{heads.period} heads of the query share {lengths[0]}"
            raise Whole(f"{node.name}: {share}, which do not divide evenly over {t.size} ranks")
        t.operand(node, operand, at, few if shared else heads)
    elif own.dim != at:
        raise Whole(f"{node.name} would be divided along dimensions {at} and {own.dim}")


def _mask(t: Attempt, node: fx.Node, mask: fx.Node, at: int, heads: Division) -> None:
    """at: which dimension is divided, counted from behind."""
    own = t.division(mask)
    if own is None:
        t.operand(node, mask, t.rank(mask) + at, heads)
    elif own.dim - t.rank(mask) != at:
        raise Whole(f"the mask of {node.name} is divided along another dimension")
    else:
        t.same(own, heads, node)


@rule(F.softmax, F.log_softmax, torch.softmax, torch.log_softmax)
def softmax(t: Attempt, node: Any) -> Division:
    division = elementwise(t, node)
    dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
    _not_along(t, node, division, [dim])
    t.work.attends = True
    return division


def _not_along(t: Attempt, node: fx.Node, division: Division, dims: Iterable[int]) -> None:
    """Raises if one of these dimensions of the first operand is the divided one."""
    rank = t.rank(node.args[0])  # type: ignore[arg-type]
    if division.dim in [dim % rank for dim in dims]:
        raise Whole(f"{called(node)} works along the divided dimension ({node.name})")


@rule(rotate, nan_where_empty, without_empty_rows)
def rowwise(t: Attempt, node: Any) -> Division:
    """Row by row, which is the last dimension."""
    division = t.aligned(node, t.tensors(node), t.rank(node))
    _not_along(t, node, division, [-1])
    return division


# -- normalisation, reduction, pooling


@rule(F.layer_norm, F.rms_norm)
def layer_norm(t: Attempt, node: Any) -> Division:
    _, shape, *weights = node.args
    division = t.first(node)
    _not_along(t, node, division, range(-len(shape), 0))
    for weight in (*weights, node.kwargs.get("weight"), node.kwargs.get("bias")):
        if isinstance(weight, fx.Node):
            t.enter(weight)
    return division


@rule(rms_norm)
def rms_norm_without_weight(t: Attempt, node: Any) -> Division:
    x, axis, *_ = node.args
    division = t.first(node)
    _not_along(t, node, division, range(axis, t.rank(x)))
    return division


@rule(BatchNorm)
def batch_norm(t: Attempt, node: Any) -> Division:
    x, *stored = node.args
    _once(t, node, x)  # of running statistics a part is taken for good, or it would be a copy that moves
    return _by_channel(t, node, x, stored)


@rule(instance_norm)
def instance_norm_(t: Attempt, node: Any) -> Division:
    return _by_channel(t, node, node.args[0], node.args[1:3])


def _once(t: Attempt, node: fx.Node, x: Any) -> None:
    """Raises if the divided dimension of `x` holds the elements several times: a rank's are in several places then."""
    division = t.division(x)
    if division is not None and t.shapes(x)[division.dim] != (division.period,) * 2:
        raise Whole(f"{node.name} has {t.shapes(x)[division.dim][0]} channels, of which {division.period} repeat")


def _by_channel(t: Attempt, node: fx.Node, x: Any, weights: Iterable[Any]) -> Division:
    division = t.division(x)
    if division is None or division.dim != 1:
        raise Whole(f"{node.name} normalises along the divided dimension")
    for weight in weights:
        if isinstance(weight, fx.Node):
            t.operand(node, weight, 0, division)
    return division


@rule(F.group_norm)
def group_norm(t: Attempt, node: Any) -> Division:
    x, groups, *weights = node.args
    own = t.division(x)
    _once(t, node, x)
    if own is not None and (len(own.blocks) > 1 or not own.even(t.size) or groups % t.size):
        raise Whole(f"{node.name} has {groups} groups of {own.period} channels, over {t.size} ranks")
    division = _by_channel(t, node, x, weights[:2])
    t.length(node, (1,), Division(0, (groups,)))
    return division


REDUCTIONS = (
    *(reduce_sum, reduce_mean, reduce_product, reduce_max, reduce_min, reduce_l1, reduce_l2, reduce_log_sum),
    *(reduce_log_sum_exp, reduce_sum_square, torch.mean, torch.sum, torch.amax, torch.amin, torch.prod),
)


@rule(*REDUCTIONS)
def reduction(t: Attempt, node: Any) -> Division:
    x, *rest = node.args
    division, dims = t.division(x), rest[0] if rest else node.kwargs.get("dim")
    if division is None or dims is None:
        raise Whole(f"{called(node)} adds up the divided dimension ({node.name})")
    dims = [dim % t.rank(x) for dim in ([dims] if isinstance(dims, int) else dims)]
    _not_along(t, node, division, dims)
    lost = sum(dim < division.dim for dim in dims) if t.rank(node) < t.rank(x) else 0
    return division.moved(division.dim - lost)


@rule(
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.avg_pool1d),
)
def pool(t: Attempt, node: Any) -> Division:
    division = t.division(node.args[0])
    if division is None or division.dim > 1:
        raise Whole(f"{called(node)} works along the divided dimension ({node.name})")
    return division


@rule(F.pad)
def pad(t: Attempt, node: Any) -> Division:
    borders = node.args[1]
    division = t.first(node)
    _not_along(t, node, division, (-1 - i // 2 for i, n in enumerate(borders) if n != 0))
    return division
