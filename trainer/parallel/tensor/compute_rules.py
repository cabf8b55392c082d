"""Sharding rules of the calls that compute: element by element, attention, normalisation, reductions.

A rule says which dimension of a call's output is sharded, and notes what else the call needs: this rank's part of a
weight or operand, this rank's number in an argument. Products are in product_rules.py, views in view_rules.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.ops.contributed.attention import grouped_attention, rotate
from onward.trainer.onnx_import.ops.elementwise import hard_sigmoid, scaled_elu, shrink, swish
from onward.trainer.onnx_import.ops.image import resize
from onward.trainer.onnx_import.ops.norm import Dropout, instance_norm, rms_norm
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
from onward.trainer.onnx_import.passes.fused_attention import Attention, nan_where_empty, without_empty_rows
from onward.trainer.parallel.tensor.propagation import Propagation, called, dim_of, rule, unary_rule
from onward.trainer.parallel.tensor.tensor_shardings import CannotShard, Result, Sharding

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
_FUNCTIONS = {getattr(owner, name, None) for name in ELEMENTWISE for owner in (torch, F, operator)}
ELEMENTWISE_CALLS = frozenset((*_FUNCTIONS, *ELEMENTWISE, *(hard_sigmoid, scaled_elu, shrink, swish))) - {None}
"""Functions, and names of methods, that compute each element of the result from those at its place."""


@rule(*ELEMENTWISE_CALLS)
def elementwise(p: Propagation, node: Any) -> Sharding:
    # numbers and strings among the operands have no dimensions
    return p.broadcast(node, [operand for operand in node.all_input_nodes if p.graph.is_tensor(operand)], p.rank(node))


@rule(Dropout)
def dropout(p: Propagation, node: Any) -> Result:
    if p.graph.submodule(node).with_mask:
        return CannotShard(f"the mask of {node.name} is an output, too")
    p.edits.random_modules.append(node.name)
    return elementwise(p, node)


@rule(StochasticDepth)
def stochastic_depth(p: Propagation, node: Any) -> Result:
    sharding = elementwise(p, node)
    # The leading dimensions have a draw for each index. All ranks make the same draws for samples; where the sharded
    # dimension (channels) is among them, each rank needs draws of its own.
    if sharding.dim < p.graph.submodule(node).mask_dims:
        p.edits.random_modules.append(node.name)
    return sharding


# -- attention


@rule(Attention, F.scaled_dot_product_attention, grouped_attention)
def attention(p: Propagation, node: Any) -> Result:
    """Shard by heads: query, key, value [.., heads, sequence, features], mask [.., heads or 1, sequence, sequence]."""
    # torch's functions take the mask as the fourth operand or by name, the module as the fourth
    query, key, value, *rest = node.args
    mask = rest[0] if rest else node.kwargs.get("attn_mask")
    if node.op == "call_module":
        if p.graph.submodule(node).dropout > 0:
            p.edits.random_modules.append(node.name)
    elif node.kwargs.get("dropout_p") or len(rest) > 1:
        return CannotShard(f"{node.name} has a dropout that only the module Attention can shard")
    rank = p.rank(query)
    dim, heads = next(  # counted from the end, since the mask may have fewer dimensions
        (found.dim - p.rank(x), found) for x in (query, key, value, mask) if (found := p.sharding(x)) is not None
    )
    # the last two dimensions are positions and features, of which attention combines all
    if dim >= -2:
        return CannotShard(f"{node.name} would be sharded along dimension {rank + dim} of {rank}, not by heads")
    for operand in (query, key, value):
        _shard_heads(p, node, operand, dim, heads)
    # heads of keys alone would be combined with all heads of the query on each rank
    if (queries := p.sharding(query)) is None:
        return CannotShard(f"the query of {node.name} is the same for all heads")
    # fewer heads of keys than of queries: a rank needs just those that its queries read
    for other in (p.sharding(key), p.sharding(value)):
        if other is not None and other.period == queries.period:
            p.require_alike(queries, other, node)
        elif other is not None:
            p.require(
                _groups_align(queries, other, p.size),
                f"{node.name}: {queries.period} heads of the query share {other.period}, "
                f"which do not divide evenly over {p.size} ranks",
            )
    if isinstance(mask, fx.Node):
        _shard_mask(p, node, mask, dim, queries)
    p.edits.has_attention = True
    return queries


def _groups_align(heads: Sharding, shared: Sharding, size: int) -> bool:
    """Whether each rank's heads of the query are just those that share its heads of key or value."""
    # the heads of the query that read one head of key or value
    times = heads.period // shared.period
    # in heads of the query on both sides: equal blocks end at the same head on each rank
    blocks = [block * heads.inner for block in heads.blocks]
    grouped = [block * shared.inner * times for block in shared.blocks]
    return grouped == blocks and shared.is_even(size) and heads.is_even(size)


def _shard_heads(p: Propagation, node: fx.Node, operand: fx.Node, dim: int, heads: Sharding) -> None:
    """Require that query, key or value be sharded by heads, unless it has one head for all."""
    rank = p.rank(operand)
    if (found := p.sharding(operand)) is not None:
        p.require(
            found.dim == rank + dim, f"{node.name} would be sharded along dimensions {rank + dim} and {found.dim}"
        )
        return
    lengths = p.shapes(operand)[dim]
    # fewer heads than the query has, each for a group of them; with samples merged into heads, both are multiples
    # one head for all broadcasts, and stays replicated
    is_grouped = lengths != (1, 1) and any(length % heads.period for length in lengths)
    # a replicated operand of fewer heads is divided by its own heads
    few = Sharding(rank + dim, lengths[:1])
    p.require(
        not is_grouped or _groups_align(heads, few, p.size),
        f"{node.name}: {heads.period} heads of the query share {lengths[0]}, "
        f"which do not divide evenly over {p.size} ranks",
    )
    p.shard_operand(node, operand, dim, few if is_grouped else heads)


def _shard_mask(p: Propagation, node: fx.Node, mask: fx.Node, dim: int, heads: Sharding) -> None:
    found = p.sharding(mask)
    if found is None:
        p.shard_operand(node, mask, dim, heads)
    elif found.dim - p.rank(mask) != dim:
        p.require(False, f"the mask of {node.name} is sharded along another dimension than its heads")
    else:
        p.require_alike(found, heads, node)


@rule(F.softmax, F.log_softmax, torch.softmax, torch.log_softmax)
def softmax(p: Propagation, node: Any) -> Result:
    sharding = elementwise(p, node)
    _require_not_along(p, node, sharding, [dim_of(node, 1, -1)])
    p.edits.has_attention = True
    return sharding


def _require_not_along(p: Propagation, node: fx.Node, sharding: Sharding, dims: Iterable[int]) -> None:
    """Require that the sharded dimension be none of these of the first operand, which the call works along."""
    rank = p.rank(node.args[0])  # type: ignore[arg-type]
    along = [dim % rank for dim in dims]
    p.require(sharding.dim not in along, f"{called(node)} works along the sharded dimension ({node.name})")


@rule(rotate, nan_where_empty, without_empty_rows)
def last_dimension(p: Propagation, node: Any) -> Result:
    sharding = elementwise(p, node)
    _require_not_along(p, node, sharding, [-1])
    return sharding


# -- normalisation, reduction, pooling


@unary_rule(F.layer_norm, F.rms_norm)
def layer_norm(p: Propagation, node: Any, x: Sharding) -> Result:
    # the normalised shape is that of the last axes, over which each rank must have all features
    _, shape, *weights = node.args
    _require_not_along(p, node, x, range(-len(shape), 0))
    # normalised features are complete on each rank; the weights' gradients are sums over the ranks' rows
    for weight in (*weights, node.kwargs.get("weight"), node.kwargs.get("bias")):
        if isinstance(weight, fx.Node):
            p.copy_to_region(weight)
    return x


@unary_rule(rms_norm)
def rms_norm_without_weight(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, axis, *_ = node.args
    _require_not_along(p, node, x, range(axis, p.rank(operand)))
    return x


@unary_rule(BatchNorm)
def batch_norm(p: Propagation, node: Any, x: Sharding) -> Result:
    # scale, bias, running mean and running variance: one number for each channel
    operand, *stored = node.args
    if p.rank(stored[0]) > 1:  # spatial=0: one scale for every position
        return CannotShard(f"{node.name} normalises every position by its own statistics")
    # Running statistics must be sharded where they are stored: the update of a slice made in the graph would be lost.
    p.require_one_period(node, operand, x)
    return _by_channel(p, node, x, stored)


@unary_rule(instance_norm)
def instance_norm_(p: Propagation, node: Any, x: Sharding) -> Result:
    return _by_channel(p, node, x, node.args[1:3])


def _by_channel(p: Propagation, node: fx.Node, x: Sharding, weights: Iterable[Any]) -> Result:
    if x.dim != 1:
        return CannotShard(f"{node.name} normalises along the sharded dimension")
    for weight in weights:
        if isinstance(weight, fx.Node):
            # a vector has the channels on its only axis, whichever axis they are in x
            p.shard_operand(node, weight, -1, x)
    return x


@unary_rule(F.group_norm)
def group_norm(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, groups, *weights = node.args
    p.require_one_period(node, operand, x)
    p.require(
        len(x.blocks) == 1 and x.is_even(p.size) and groups % p.size == 0,
        f"{node.name} has {groups} groups of {x.period} channels, over {p.size} ranks",
    )
    # the argument num_groups
    p.set_local_length(node, (1,), Sharding(0, (groups,)))
    return _by_channel(p, node, x, weights[:2])


REDUCTIONS = (
    *(reduce_sum, reduce_mean, reduce_product, reduce_max, reduce_min, reduce_l1, reduce_l2, reduce_log_sum),
    *(reduce_log_sum_exp, reduce_sum_square, torch.mean, torch.sum, torch.amax, torch.amin, torch.prod),
)


@unary_rule(*REDUCTIONS)
def reduction(p: Propagation, node: Any, x: Sharding) -> Result:
    operand = node.args[0]
    # without axes everything is reduced
    dims = dim_of(node, 1, None)
    if dims is None:
        return CannotShard(f"{called(node)} reduces the sharded dimension ({node.name})")
    dims = [dim % p.rank(operand) for dim in ([dims] if isinstance(dims, int) else dims)]
    _require_not_along(p, node, x, dims)
    # without keepdims, reduced axes in front of the sharded one move it
    removed = sum(dim < x.dim for dim in dims) if p.rank(node) < p.rank(operand) else 0
    return x.on_dim(x.dim - removed)


@unary_rule(
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.avg_pool1d),
)
def pool(p: Propagation, node: Any, x: Sharding) -> Result:
    # batch and channels are in front of the axes that windows move over
    return x if x.dim <= 1 else CannotShard(f"{called(node)} works along the sharded dimension ({node.name})")


@unary_rule(resize)
def resize_(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, target, lengths, _ = node.args
    if x.dim in target.axes:
        same = p.shapes(operand)[x.dim] == p.shapes(node)[x.dim] and target.roi is None
        p.require(same and target.policy == "stretch", f"{node.name} resizes the sharded dimension")
        if lengths is not None:
            p.set_local_length(node, (2, target.axes.index(x.dim)), x)
    return x


@unary_rule(F.pad)
def pad(p: Propagation, node: Any, x: Sharding) -> Result:
    borders = node.args[1]  # (before, after) of the last dimension, then of the one before it, ...
    _require_not_along(p, node, x, (-1 - i // 2 for i, width in enumerate(borders) if width != 0))
    return x
