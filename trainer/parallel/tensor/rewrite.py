"""Rewrite a graph into what one rank of the tensor axis computes of it.

    x = inputs                                      weight [256, 64], weight_1 [64, 256]
    linear = linear(x, weight, bias)
    reshape = linear.reshape(-1, 4, 64)             4 heads

    x = inputs                                      weight [128, 64], weight_1 [64, 128]
    copied = copy_to_region(x, group)
    linear = linear(copied, weight, bias)           bias [128]
    reshape = linear.reshape(-1, 2, 64)             this rank's 2 heads: a local length

The row-parallel product that ends the region loses its bias, which reduce_from_region's result gets.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from onward.trainer.distributed.collectives import copy_to_region, reduce_from_region
from onward.trainer.distributed.weights import Interval, Placement, slices
from onward.trainer.onnx_graph.files.external_data import copy_bytes
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.tensor.graph_analysis import (
    CONVOLUTIONS,
    TRANSPOSED,
    copy_meta,
    is_low_rank,
    stored_tensor,
)
from onward.trainer.parallel.tensor.region_dropout import seed_by_rank
from onward.trainer.parallel.tensor.region_edits import LocalLength, RegionEdits
from onward.trainer.parallel.tensor.regions import TensorSharding
from onward.trainer.parallel.tensor.tensor_shardings import Sharding

# -- what stands in the rewritten graph beside copy_to_region and reduce_from_region


def local_slice(x: Tensor, dim: int, period: int, intervals: Sequence[Interval]) -> Tensor:
    """Return the elements in `intervals` of each `period` elements: x [.., periods x period, ..] -> [.., fewer, ..]."""
    periods = x.unflatten(dim, (-1, period))  # type: ignore[no-untyped-call]
    # one piece for each block of the sharding
    pieces = [periods.narrow(dim + 1, start, stop - start) for start, stop in intervals]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1) if len(pieces) > 1 else pieces[0].flatten(dim, dim + 1)


def row_parallel_low_rank(x: Tensor, a: Tensor, b: Tensor, scale: float, reverse: bool, group: str) -> Tensor:
    """Return an adapter's product x A' B' (x B A if reverse) of an x whose features are sharded. Collective.

    x [.., inputs / size] -> [.., outputs], complete on every rank. The all-reduce is between the two products, where
    the result has only the adapter's `rank` features.
    """
    narrow = reduce_from_region(x @ (b if reverse else a.mT), group)
    return (narrow * scale) @ (a if reverse else b.mT)


# -- the rewriting


def shard_regions(module: ImportedGraph, found: TensorSharding, *, rank: int, group: str) -> dict[str, Placement]:
    """Rewrite the graph, in place, to what one rank of the tensor axis computes of it.

    rank: this rank's coordinate; group: the name of the axis's process group. Sharded weights and running statistics
    become this rank's parts; returns which part each is, by initializer name. Every node whose value is sharded, a
    partial sum or on its way into a region gets the number of its region as `meta["tensor_parallel"]`: pipeline stages
    cannot be cut there.
    """
    rewriters = [
        _RegionRewriter(module, region.edits, number, (rank, found.size), group)
        for number, region in enumerate(found.regions)
    ]
    for rewriter in rewriters:
        rewriter.apply()
    for rewriter in rewriters:  # last: the sum that leaves one region may be the value that enters another
        rewriter.reduce_row_products()
    # one weight may be in several regions, sharded alike
    weights = {path: sharding for region in found.regions for path, sharding in region.edits.weights.items()}
    placements = {}
    for path, sharding in weights.items():
        placements[path] = sharding.placement(stored_tensor(module, path).shape, rank, found.size)
    return keep_shards(module, placements)


def keep_shards(module: ImportedGraph, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Replace stored tensors by the parts that placements, by path, describe; return these by initializer name."""
    for path, placement in placements.items():
        _keep_shard(module, path, placement)
    module.graph.lint()
    module.recompile()
    return {module.onnx_names[path]: placement for path, placement in placements.items()}


def _keep_shard(module: nn.Module, path: str, placement: Placement) -> None:
    """Replace a stored tensor by the part that a placement describes."""
    name, _, leaf = path.rpartition(".")
    owner = module.get_submodule(name)
    full = stored_tensor(module, path)
    # a copy and not a view of the full tensor, which would keep all of its memory
    shard = full.new_empty(placement.local_shape)
    with torch.no_grad():
        for box, piece in placement.take(full):
            copy_bytes(shard[slices(box)], piece)
    if isinstance(full, nn.Parameter):
        owner.register_parameter(leaf, nn.Parameter(shard, requires_grad=full.requires_grad))
    else:
        owner.register_buffer(leaf, shard, persistent=leaf not in owner._non_persistent_buffers_set)


class _RegionRewriter:
    """Applies the edits of one region. place: (this rank's coordinate, size of the tensor axis)."""

    def __init__(
        self, module: ImportedGraph, edits: RegionEdits, number: int, place: tuple[int, int], group: str
    ) -> None:
        self.module = module
        self.graph = module.graph
        self.edits = edits
        self.number = number
        self.place = place
        self.group = group
        self.nodes = {node.name: node for node in self.graph.nodes}

    def apply(self) -> None:
        # arguments first: the nodes that are put in below change who reads what
        for name in (*self.edits.sharded, *self.edits.row_products):
            self.nodes[name].meta["tensor_parallel"] = self.number
        for length in self.edits.local_lengths:
            self._set_local_length(length)
        for name, sharding in self.edits.size_calls:
            self._scale_to_full_length(self.nodes[name], sharding)
        for name in self.edits.random_modules:
            seed_by_rank(self.module, self.nodes[name], self.place[0], f"rank_seeded_{self.number}")
        for name in self.edits.copied:
            self._copy_to_region(self.nodes[name])
        for (reader, operand), sharding in self.edits.sliced.items():
            self._slice(self.nodes[reader], self.nodes[operand], sharding)

    def reduce_row_products(self) -> None:
        """Sum the partial results of the row-parallel products, after all regions were applied."""
        for name in self.edits.row_products:
            self._reduce(self.nodes[name])

    def _call(self, function: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta["tensor_parallel"] = self.number
        return node

    def _set_local_length(self, length: LocalLength) -> None:
        node, (first, *rest) = self.nodes[length.node], length.argument
        value: Any = node.kwargs[first] if isinstance(first, str) else node.args[first]
        old = value[rest[0]] if rest else value
        local = length.sharding.local_length(*self.place)
        new: Any = length.periods * local
        # the graph computes the full length, perhaps of several periods: this rank's part of it
        if isinstance(old, fx.Node):
            with self.graph.inserting_before(node):
                new = self._call(operator.floordiv, self._call(operator.mul, old, local), length.sharding.period)
        if rest:
            new = [*value[: rest[0]], new, *value[rest[0] + 1 :]]  # type: ignore[operator]
        if isinstance(first, str):
            node.update_kwarg(first, new)
        else:
            node.update_arg(first, new)

    def _scale_to_full_length(self, node: fx.Node, sharding: Sharding) -> None:
        """Make a `size` call that gives this rank's length give the length of the full tensor."""
        with self.graph.inserting_after(node):
            # local length x period / local part of a period: exact, since both are whole periods
            product = self._call(operator.mul, node, sharding.period)
        with self.graph.inserting_after(product):
            full = self._call(operator.floordiv, product, sharding.local_length(*self.place))
        node.replace_all_uses_with(full, delete_user_cb=lambda user: user is not product)

    def _copy_to_region(self, operand: fx.Node) -> None:
        """Insert one node for all readers inside the region, so that they share one all-reduce."""
        # a row-parallel product is not among them: all that it reads replicated is its bias, added to the sum
        sharded = {*self.edits.sharded}
        readers = [user for user in operand.users if user.name in sharded]
        # nodes compare by their order in the graph: before the first reader
        with self.graph.inserting_before(min(readers)):
            copied = self._call(copy_to_region, operand, self.group)
        copied.meta.update({key: operand.meta[key] for key in ("probes", "rank") if key in operand.meta})
        for reader in readers:
            reader.replace_input_with(operand, copied)
        self.nodes[operand.name] = copied  # `_slice` takes its part of this one

    def _slice(self, reader: fx.Node, operand: fx.Node, sharding: Sharding) -> None:
        intervals = sharding.intervals(*self.place)
        with self.graph.inserting_before(reader):
            part = self._call(local_slice, operand, sharding.dim, sharding.period, intervals)
        reader.replace_input_with(operand, part)

    def _reduce(self, node: fx.Node) -> None:
        """Sum a row-parallel product over the ranks, and add its bias once, to the sum."""
        if is_low_rank(node):
            node.target = row_parallel_low_rank
            node.args = (*node.args, self.group)
            node.meta.pop("tensor_parallel")
            return
        bias, alpha, beta = _take_bias(node)
        readers = [*node.users]
        with self.graph.inserting_after(node):
            result = self.graph.call_function(reduce_from_region, (node, self.group))
        # the bias must not be scaled: alpha multiplies the sum before it is added
        if alpha != 1:
            with self.graph.inserting_after(result):
                result = self.graph.call_function(torch.mul, (result, alpha))
        if bias is not None:
            convolutions = [*CONVOLUTIONS, *TRANSPOSED]
            spatial_dims = 1 + convolutions.index(node.target) % 3 if node.target in convolutions else 0
            result = self._add_bias(result, bias, beta, spatial_dims)
        copy_meta(result, node)
        for reader in readers:
            reader.replace_input_with(node, result)

    def _add_bias(self, total: fx.Node, bias: fx.Node, factor: Any, spatial_dims: int) -> fx.Node:
        with self.graph.inserting_after(total):
            shape = [-1, *[1] * spatial_dims]
            shaped = self.graph.call_method("reshape", (bias, shape)) if spatial_dims else bias
        with self.graph.inserting_after(shaped if spatial_dims else total):
            return self.graph.call_function(torch.add, (total, shaped), {"alpha": factor} if factor != 1 else {})


def _take_bias(node: fx.Node) -> tuple[Any, Any, Any]:
    """Remove the bias from a call; returns it (None without one), and the factors of product and bias."""
    if node.target is torch.addmm:
        bias, x, weight = node.args
        factors = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        node.target = torch.mm
        node.args = (x, weight)
        node.kwargs = {}
        return bias, *factors
    if node.target in (torch.matmul, torch.mm, torch.einsum) or len(node.args) < 3:
        return None, 1, 1
    bias = node.args[2]
    node.update_arg(2, None)
    return bias, 1, 1
