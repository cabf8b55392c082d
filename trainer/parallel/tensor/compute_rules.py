"""Sharding rules of the calls that compute: element by element, products, attention, normalisation, reductions.

A rule says which dimension of a call's output is sharded, and notes what else the call needs: this rank's part of a
weight or operand, this rank's number in an argument. Two convolutions, by channels, over 2 ranks:

    x [n, 3, h, w] --- conv [64, 3, 3, 3] --- batch_norm --- relu --- conv [64, 64, 3, 3] --- bias ---

    x --- copy_to_region --- conv [32, 3, 3, 3] --- batch_norm --- relu --- conv [64, 32, 3, 3] --- all-reduce --- bias
                             output channels        [n, 32, h, w]           input channels          added once
                             (column-parallel)                              (row-parallel)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.onnx_import.ops.attention import grouped_attention, rotate
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm
from onward.trainer.onnx_import.ops.elementwise import hard_sigmoid, scaled_elu, shrink, swish
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
from onward.trainer.onnx_import.passes.attention import Attention, nan_where_empty, without_empty_rows
from onward.trainer.parallel.tensor.graph_analysis import CONVOLUTIONS, TRANSPOSED, Product
from onward.trainer.parallel.tensor.propagation import Propagation, called, rule, unary_rule
from onward.trainer.parallel.tensor.sharding import CannotShard, Replicated, Result, Sharding

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
def elementwise(p: Propagation, node: Any) -> Sharding:
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


# -- products


@rule(F.linear, torch.addmm)
def linear(p: Propagation, node: Any) -> Result:
    product = p.graph.products.get(node)
    if product is None:
        return CannotShard(f"{node.name} multiplies by a computed matrix")
    x = p.sharding(product.x)
    if x is None or p.sharding(product.bias) is not None:
        return CannotShard(f"{node.name} adds a sharded value")
    return _row_parallel(p, product, x) if x.dim == p.rank(product.x) - 1 else _replicated_weight(p, product, x)


def _row_parallel(p: Propagation, product: Product, x: Sharding) -> Result:
    """Shard the input features of the weight; each rank's output is a partial sum."""
    rows = p.graph.tensor(product.row_path).shape[product.inputs]
    p.require(rows == x.period, f"{product.name} has {rows} rows, but the sharding pattern repeats every {x.period}")
    p.shard_weight(product.node, product.row_path, x.on_dim(product.inputs))
    p.row_products.append(product)
    p.edits.row_products.append(product.node.name)
    # The product itself is a partial sum (Partial in DTensor); rewrite.py all-reduces it: readers get the full value.
    return Replicated()


def _replicated_weight(p: Propagation, product: Product, x: Sharding) -> Sharding:
    """Multiply each rank's samples or heads by the full weight: a dimension that the product does not sum over."""
    for operand in (*product.weight_operands, product.bias):
        if isinstance(operand, fx.Node):
            p.copy_to_region(operand)
    return x


@rule(torch.matmul, torch.mm, torch.bmm)
def matmul(p: Propagation, node: Any) -> Result:
    if node in p.graph.products:
        return linear(p, node)
    a, b = node.args
    rank = p.rank(node)
    if min(p.rank(a), p.rank(b)) < 2:
        return CannotShard(f"{node.name} multiplies by a vector")
    a_sharding, b_sharding = p.sharding(a), p.sharding(b)
    # dimensions counted from the end, for a [.., rows, summed] and b [.., summed, columns]: -1 is the last one
    a_dim = a_sharding.dim - p.rank(a) if a_sharding else None
    b_dim = b_sharding.dim - p.rank(b) if b_sharding else None
    if a_dim == -1 or b_dim == -2:
        return CannotShard(f"{node.name} sums over the sharded dimension")
    if (a_dim == -2 or b_dim == -1) and a_sharding and b_sharding:
        return CannotShard(f"two dimensions of {node.name} would be sharded")
    if a_sharding and a_dim == -2:  # the rows of a are those of the output; b is replicated
        p.copy_to_region(b)
        return a_sharding.on_dim(rank - 2)
    if b_sharding and b_dim == -1:
        p.copy_to_region(a)
        return b_sharding.on_dim(rank - 1)
    return p.broadcast(node, [a, b], rank)  # a dimension of the batch, such as heads


@rule(*CONVOLUTIONS, *TRANSPOSED)
def convolution(p: Propagation, node: Any) -> Result:
    product = p.graph.products.get(node)
    if product is None:
        return CannotShard(f"{node.name} convolves with a computed kernel")
    x = p.sharding(product.x)
    if p.sharding(product.bias) is not None:
        return CannotShard(f"{node.name} adds a sharded value")
    if x is None or x.dim > 1:
        return CannotShard(f"{node.name} convolves along the sharded dimension")
    if x.dim == 0:
        return _replicated_weight(p, product, x)
    return _row_parallel(p, product, x) if product.groups == 1 else _grouped_convolution(p, product, x)


def _grouped_convolution(p: Propagation, product: Product, x: Sharding) -> Result:
    """Give each rank complete groups: single channels (depthwise), or as many groups as divide evenly."""
    channels, groups = x.period, product.groups
    _require_no_repeats(p, product.node, product.x, x)
    if product.outputs:
        return CannotShard(f"{product.node.name} is a transposed convolution in {groups} groups")
    outputs = p.graph.tensor(product.path).shape[0]
    outputs_per_group = outputs // groups
    if groups == channels:
        by_group = x
    elif len(x.blocks) == 1 and x.is_even(p.size) and groups % p.size == 0:
        # several channels per group: the groups are the units, their channels stay together
        by_group = Sharding(1, (groups,))
    else:
        return CannotShard(f"{product.node.name} has {groups} groups of {channels} channels, over {p.size} ranks")
    columns = by_group.columns_per_unit if outputs_per_group == 1 else 0
    result = replace(by_group, inner=by_group.inner * outputs_per_group, columns_per_unit=columns)
    p.shard_weight(product.node, product.path, result.on_dim(0))
    if isinstance(product.bias, fx.Node):
        p.shard_operand(product.node, product.bias, -1, result)
    # each rank convolves its own groups, so the argument must be their number on this rank
    p.set_local_length(product.node, (6,), by_group)  # the argument `groups`
    return result


# -- attention


@rule(Attention, F.scaled_dot_product_attention, grouped_attention)
def attention(p: Propagation, node: Any) -> Result:
    """Shard by heads: query, key, value [.., heads, sequence, features], mask [.., heads or 1, sequence, sequence]."""
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
    if dim >= -2:
        return CannotShard(f"{node.name} would be sharded along dimension {rank + dim} of {rank}, not by heads")
    for operand in (query, key, value):
        _shard_heads(p, node, operand, dim, heads)
    if (queries := p.sharding(query)) is None:
        return CannotShard(f"the query of {node.name} is the same for all heads")
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
    times = heads.period // shared.period
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
    is_grouped = lengths != (1, 1) and any(length % heads.period for length in lengths)
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
    dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
    _require_not_along(p, node, sharding, [dim])
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
    operand, *stored = node.args
    # Running statistics must be sharded where they are stored: the update of a slice made in the graph would be lost.
    _require_no_repeats(p, node, operand, x)
    return _by_channel(p, node, x, stored)


@unary_rule(instance_norm)
def instance_norm_(p: Propagation, node: Any, x: Sharding) -> Result:
    return _by_channel(p, node, x, node.args[1:3])


def _require_no_repeats(p: Propagation, node: fx.Node, operand: fx.Node, x: Sharding) -> None:
    """Require that the sharded dimension be one period: else a rank's channels are in several places."""
    lengths = p.shapes(operand)[x.dim]
    repeats = f"{node.name} has {lengths[0]} channels, but the sharding pattern repeats every {x.period}"
    p.require(lengths == (x.period, x.period), repeats)


def _by_channel(p: Propagation, node: fx.Node, x: Sharding, weights: Iterable[Any]) -> Result:
    if x.dim != 1:
        return CannotShard(f"{node.name} normalises along the sharded dimension")
    for weight in weights:
        if isinstance(weight, fx.Node):
            p.shard_operand(node, weight, -1, x)
    return x


@unary_rule(F.group_norm)
def group_norm(p: Propagation, node: Any, x: Sharding) -> Result:
    operand, groups, *weights = node.args
    _require_no_repeats(p, node, operand, x)
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
    operand, *rest = node.args
    dims = rest[0] if rest else node.kwargs.get("dim")
    if dims is None:
        return CannotShard(f"{called(node)} reduces the sharded dimension ({node.name})")
    dims = [dim % p.rank(operand) for dim in ([dims] if isinstance(dims, int) else dims)]
    _require_not_along(p, node, x, dims)
    removed = sum(dim < x.dim for dim in dims) if p.rank(node) < p.rank(operand) else 0
    return x.on_dim(x.dim - removed)


@unary_rule(
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d, torch.avg_pool1d),
)
def pool(p: Propagation, node: Any, x: Sharding) -> Result:
    return x if x.dim <= 1 else CannotShard(f"{called(node)} works along the sharded dimension ({node.name})")


@unary_rule(F.pad)
def pad(p: Propagation, node: Any, x: Sharding) -> Result:
    borders = node.args[1]  # (before, after) of the last dimension, then of the one before it, ...
    _require_not_along(p, node, x, (-1 - i // 2 for i, width in enumerate(borders) if width != 0))
    return x
