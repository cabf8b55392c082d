"""Sharding rules of products and convolutions: where a region ends, and how it passes through those inside.

    x [b, s, F] x weight [F, out]            F sharded: row-parallel; the region ends with an all-reduce
    x [b, h, s, F] x weight [F, out]         samples, heads or positions sharded: the weight is replicated
    x [E, t, F] x weight [E, F, out]         F sharded: row-parallel, expert by expert; E sharded: the weight, too
    x [b, C, h, w] * kernel [C, 1, 7, 7]     depthwise, C sharded: each rank convolves its channels, nothing is sent

Two convolutions, by channels, over 2 ranks:

    x [n, 3, h, w] --- conv [64, 3, 3, 3] --- batch_norm --- relu --- conv [64, 64, 3, 3] --- bias ---

    x --- copy_to_region --- conv [32, 3, 3, 3] --- batch_norm --- relu --- conv [64, 32, 3, 3] --- all-reduce --- bias
                             output channels        [n, 32, h, w]           input channels          added once
                             (column-parallel)                              (row-parallel)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onward.trainer.parallel.tensor.graph_analysis import CONVOLUTIONS, TRANSPOSED, Product, einsum_labels
from onward.trainer.parallel.tensor.propagation import Propagation, rule
from onward.trainer.parallel.tensor.tensor_shardings import CannotShard, Replicated, Result, Sharding


@rule(F.linear, torch.addmm)
def linear(p: Propagation, node: Any) -> Result:
    product = p.graph.products.get(node)
    if product is None:
        return CannotShard(f"{node.name} multiplies by a computed matrix")
    x = p.sharding(product.x)
    # a sharded bias would be added on each rank and then summed
    if x is None or p.sharding(product.bias) is not None:
        return CannotShard(f"{node.name} adds a sharded value")
    # the last axis of x is the one that the product sums over
    if x.dim == p.rank(product.x) - 1:
        return _row_parallel(p, product, x)
    return _stacked(p, product, x) if product.is_stacked else _replicated_weight(p, product, x)


def _row_parallel(p: Propagation, product: Product, x: Sharding) -> Result:
    """Shard the input features of the weight; each rank's output is a partial sum."""
    if product.part is not None:
        return CannotShard(f"{product.name} would be row-parallel, and {product.node.name} reads a part of its columns")
    # the rows of the weight meet the features of x, rank by rank
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


def _stacked(p: Propagation, product: Product, x: Sharding) -> Sharding:
    """Multiply by a weight [experts or heads, inputs, outputs] an x whose features are complete on each rank."""
    # batch axes of the result are aligned with those of x at the end
    result = x.on_dim(x.dim + p.rank(product.node) - p.rank(product.x))
    # one matrix broadcasts over a sharded dimension in front
    experts = p.graph.tensor(product.path).shape[0]
    if x.dim - p.rank(product.x) != -3 or experts == 1:
        _replicated_weight(p, product, x)
        return result
    p.require(experts == x.period, f"{product.name} has {experts} matrices, but the sharding repeats every {x.period}")
    p.shard_weight(product.node, product.path, x.on_dim(0))
    return result


@rule(torch.einsum)
def einsum(p: Propagation, node: Any) -> Result:
    """Follow the label of the sharded dimension: every operand that has it is sharded along it."""
    *terms, result = einsum_labels(node)
    operands = list(zip(node.args[1:], terms, strict=False))
    sharded = []
    for operand, term in operands:
        sharding = p.sharding(operand)
        if sharding is not None and term:
            sharded.append((sharding, term[sharding.dim]))
    if not sharded:
        return CannotShard(f"the labels of {node.name} are implicit")
    # the label of the sharded axis says where it is in every other operand
    x, label = sharded[0]
    for other, another in sharded[1:]:
        p.require(label == another, f"{node.name} would be sharded along {label} and along {another}")
        p.require_alike(x, other, node)
    product = p.graph.products.get(node)
    if label not in result:
        # a label that the result lacks is summed over: each rank has a partial sum
        weight = "" if product is None else terms[1 - node.args[1:].index(product.x)]
        if product is None or label not in weight:
            return CannotShard(f"{node.name} sums over the sharded dimension")
        return _row_parallel(p, replace(product, inputs=weight.index(label)), x)
    for operand, term in operands:
        if p.sharding(operand) is not None:
            continue
        # an operand with the label meets the sharded dimension, one without it is read completely
        if label in term:
            p.shard_operand(node, operand, term.index(label) - len(term), x)
        else:
            p.copy_to_region(operand)
    return x.on_dim(result.index(label))


@rule(torch.matmul, torch.mm, torch.bmm)
def matmul(p: Propagation, node: Any) -> Result:
    if node in p.graph.products:
        return linear(p, node)
    a, b = node.args
    rank = p.rank(node)
    # a vector has no axis of rows or columns to shard
    if min(p.rank(a), p.rank(b)) < 2:
        return CannotShard(f"{node.name} multiplies by a vector")
    a_sharding = p.sharding(a)
    b_sharding = p.sharding(b)
    # dimensions counted from the end, for a [.., rows, summed] and b [.., summed, columns]: -1 is the last one
    a_dim = a_sharding.dim - p.rank(a) if a_sharding else None
    b_dim = b_sharding.dim - p.rank(b) if b_sharding else None
    if a_dim == -1 or b_dim == -2:
        return CannotShard(f"{node.name} sums over the sharded dimension")
    shards_a_matrix = a_dim == -2 or b_dim == -1
    if shards_a_matrix and a_sharding and b_sharding:
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
    # by samples: each rank convolves its own with the whole kernel
    if x.dim == 0:
        return _replicated_weight(p, product, x)
    return _row_parallel(p, product, x) if product.groups == 1 else _grouped_convolution(p, product, x)


def _grouped_convolution(p: Propagation, product: Product, x: Sharding) -> Result:
    """Give each rank complete groups: single channels (depthwise), or as many groups as divide evenly."""
    channels = x.period
    groups = product.groups
    p.require_one_period(product.node, product.x, x)
    if product.outputs:
        return CannotShard(f"{product.node.name} is a transposed convolution in {groups} groups")
    outputs = p.graph.tensor(product.path).shape[0]
    outputs_per_group = outputs // groups
    # depthwise: the channels of the kernel are those of x, block for block
    if groups == channels:
        by_group = x
    elif len(x.blocks) == 1 and x.is_even(p.size) and groups % p.size == 0:
        # several channels per group: the groups are the units, their channels stay together
        by_group = Sharding(1, (groups,))
    else:
        return CannotShard(f"{product.node.name} has {groups} groups of {channels} channels, over {p.size} ranks")
    # with several outputs of a group a unit no longer stands for columns of the weight before
    columns = by_group.columns_per_unit if outputs_per_group == 1 else 0
    result = replace(by_group, inner=by_group.inner * outputs_per_group, columns_per_unit=columns)
    p.shard_weight(product.node, product.path, result.on_dim(0))
    if isinstance(product.bias, fx.Node):
        p.shard_operand(product.node, product.bias, -1, result)
    # each rank convolves its own groups, so the argument must be their number on this rank
    p.set_local_length(product.node, (6,), by_group)  # the argument `groups`
    return result
