"""Sharding rules of the calls that read by index: along another dimension than the sharded one, each rank its part."""

from __future__ import annotations

from typing import Any

from onward.trainer.onnx_import.ops.gather import gather_along, gather_elements, gather_rows
from onward.trainer.parallel.tensor.propagation import Propagation, rule, unary_rule
from onward.trainer.parallel.tensor.tensor_shardings import CannotShard, Result, Sharding


@rule(gather_elements)
def gather_elements_(p: Propagation, node: Any) -> Result:
    """Read with this rank's part of the indices, as DeBERTa reads the score of each distance, head by head."""
    operand, axis, indices = node.args
    sharding = p.broadcast(node, [operand, indices], p.rank(node))
    p.require(sharding.dim != axis % p.rank(node), f"{node.name} gathers along the sharded dimension")
    # indices of all positions of the axis, else a rank's part of them would not match its part of the values
    same = p.shapes(operand)[sharding.dim] == p.shapes(indices)[sharding.dim]
    p.require(same, f"{node.name} gathers from a part of the sharded dimension")
    return sharding


@unary_rule(gather_rows)
def gather_rows_(p: Propagation, node: Any, x: Sharding) -> Result:
    """Read the same rows on every rank, of each its features: the messages along the edges of a graph."""
    return _gather(p, node, x, 0, node.args[1])


@unary_rule(gather_along)
def gather_along_(p: Propagation, node: Any, x: Sharding) -> Result:
    _, axis, indices = node.args
    return _gather(p, node, x, axis, indices)


def _gather(p: Propagation, node: Any, x: Sharding, axis: int, indices: Any) -> Result:
    if p.sharding(indices) is not None:
        return CannotShard(f"{node.name} reads by sharded indices")
    before = p.rank(node.args[0])
    axis %= before
    p.require(x.dim != axis, f"{node.name} gathers along the sharded dimension")
    # the axes of the indices take the place of the one that is read along
    return x.on_dim(x.dim if x.dim < axis else x.dim + p.rank(node) - before)
