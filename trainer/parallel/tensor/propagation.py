"""Propagation of a sharding through the graph, from column-parallel products to the row-parallel ones that end it.

    x [b, s, 64] --- linear --- gelu --- linear --- y            before: 2 layers, 64 -> 256 -> 64

    x --- linear ------- gelu ------- linear --- all-reduce --- y    over 2 ranks
          column-        [b, s, 128]  row-
          parallel       on each      parallel                       what `shardings` holds:
          Sharding(dim 2, blocks (256,))      Replicated             linear and gelu; the region ends at the second

The nodes are visited in the order of the graph. The rule of each call (*_rules.py) gets the shardings of its operands
and returns that of its output, or why there is none (`sharding.Problem`). A rule changes nothing: what must be changed
in the graph it notes in `RegionEdits`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from onward.trainer.parallel.tensor.graph_analysis import GraphAnalysis, Product, is_low_rank
from onward.trainer.parallel.tensor.region_edits import LocalLength, RegionEdits
from onward.trainer.parallel.tensor.tensor_shardings import (
    CannotShard,
    MustShardTogether,
    NeedsFinerBlocks,
    Problem,
    Replicated,
    Result,
    Sharding,
)


class Propagation:
    """One attempt to shard the columns of some products, up to the row-parallel products that end the region.

    columns: the products to be column-parallel. cuts: by weight, the columns at which a new block begins.
    slice_joined: what is joined with a sharded value stays replicated, and each rank takes its part of it.
    kept_whole: paths of vectors, such as biases, that are not sharded where they are stored; each rank takes its part.
    """

    def __init__(
        self,
        graph: GraphAnalysis,
        size: int,
        columns: Iterable[fx.Node],
        cuts: dict[str, frozenset[int]],
        *,
        slice_joined: bool = False,
        kept_whole: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self.size = size
        self.slice_joined = slice_joined
        self.kept_whole = kept_whole
        self.columns = set(columns)
        self.cuts = cuts
        self.shardings: dict[fx.Node, Any] = {}
        """Node -> Sharding, or a list of them for a tuple of outputs. All these nodes have known shapes."""
        self.row_products: list[Product] = []
        self.edits = RegionEdits()
        self._unmet: Problem | None = None

    def run(self) -> RegionEdits | Problem:
        """Return what to change in the graph, or the first problem."""
        waiting = {*self.columns}
        while waiting:
            # in the order of the graph, so that all sharded operands of a node have been visited before it
            node = min(waiting, key=self.graph.order.__getitem__)
            waiting.remove(node)
            result = self._result_of(node)
            if isinstance(result, CannotShard | NeedsFinerBlocks | MustShardTogether):
                return result
            if not isinstance(result, Replicated):
                self.shardings[node] = result
                self.edits.sharded.append(node.name)
                waiting |= node.users.keys()
        # without one nothing ends the region
        if not self.row_products:
            return CannotShard("no row-parallel product follows it")
        return self.edits

    def _result_of(self, node: fx.Node) -> Result:
        """Apply the rule of a node. An unmet requirement comes before the result, which is meaningless then."""
        result = self._column_parallel(node) if node in self.columns else self._apply_rule(node)
        return self._unmet or result

    def _apply_rule(self, node: fx.Node) -> Result:
        if node.op == "output":
            return CannotShard("its output reaches an output of the graph, and no row-parallel product comes before")
        target: Any = node.target
        if node.op == "call_module":
            target = type(self.graph.submodule(node))
        if is_low_rank(node):
            target = torch.matmul
        # without a rule nothing is known of a call, so that the region cannot pass through it
        if (apply := SHARDING_RULES.get(target)) is None:
            return CannotShard(f"there is no sharding rule for {called(node)} ({node.name})")
        if not self.graph.has_known_shape(node):
            return _unknown_shape(node)
        return apply(self, node)

    def _column_parallel(self, node: fx.Node) -> Result:
        product = self.graph.products[node]
        # a column-parallel product reads a replicated input: behind a sharded one it would have to be row-parallel
        if product.x in self.shardings:
            return CannotShard(f"the input of {product.name} is sharded already")
        if not self.graph.has_known_shape(node):
            return _unknown_shape(node)
        total = self.graph.num_outputs(product)
        self._check_chain(product, total)
        # the kernel of a convolution in groups has inputs of one group only, so its input is sharded, too
        if product.groups > 1:
            return self._grouped(product, total)
        dim = product.output_dim % self.rank(node)
        sharding = self._of_columns(product, total, dim)
        self.copy_to_region(product.x)
        if product.part is None:
            self.shard_weight(node, product.path, sharding.on_dim(product.outputs))
        else:
            self._shard_parts(product, product.part.split)
        if product.is_low_rank:
            # x A' B': only B has the columns; A is replicated, and its gradient is a sum over the ranks
            weights = product.weight_operands
            self.copy_to_region(next(node for node in weights if self.graph.stored(node) == product.row_path))
        if isinstance(product.bias, fx.Node):
            self.shard_operand(node, product.bias, -1, sharding)
        return sharding

    def _of_columns(self, product: Product, total: int, dim: int) -> Sharding:
        first = product.part.start if product.part else 0
        blocks = self._blocks(product.name, first, first + total)
        # each rank takes a part of each block, which must have an element for it
        self.require(min(blocks) >= self.size, f"its {min(blocks)} columns are fewer than {self.size} ranks")
        return Sharding(dim, blocks, weight=product.name, first_column=first, columns_per_unit=1)

    def _blocks(self, weight: str, first: int, last: int) -> tuple[int, ...]:
        """Return the lengths of the blocks of these columns."""
        # cuts count columns of the whole weight, and a product may read only some of these
        inside = {cut for cut in self.cuts.get(weight, ()) if first < cut < last}
        return tuple(end - start for start, end in itertools.pairwise([first, *sorted(inside), last]))

    def _shard_parts(self, product: Product, split: fx.Node) -> None:
        """Shard a matrix of which products read parts, and require that all of these be column-parallel."""
        others = [reader for reader in self.graph.readers_of_parts(split) if reader not in self.columns]
        # the split would give any other reader this rank's part of what it needs completely
        if unknown := [reader for reader in others if reader not in self.graph.products]:
            self.require(False, f"{product.name} is also read by {unknown[0].name}, which needs all of it")
        elif others:
            self.add_problem(MustShardTogether(tuple(others)))
        # each part is divided over all ranks by itself: a rank needs its share of every part
        ends: list[int] = [0, *itertools.accumulate(split.args[1])]  # type: ignore[arg-type]
        parts = [self._blocks(product.name, start, stop) for start, stop in itertools.pairwise(ends)]
        self.shard_weight(split, product.path, Sharding(0, tuple(itertools.chain(*parts))))
        for index, blocks in enumerate(parts):
            self.set_local_length(split, (1, index), Sharding(0, blocks))

    def _grouped(self, product: Product, total: int) -> Result:
        """Begin with a convolution in groups, such as a depthwise one: each rank reads the channels of its groups."""
        if not self.graph.has_known_shape(product.x):
            return _unknown_shape(product.x)
        channels = self.shapes(product.x)[1][0]
        # depthwise: output channel i is computed from input channel i, so that both have the same blocks
        x = self._of_columns(product, channels, 1) if total == channels else Sharding(1, (channels,))
        self.require(product.groups >= self.size, f"its {product.groups} groups are fewer than {self.size} ranks")
        self.copy_to_region(product.x)
        self.edits.sliced[product.node.name, product.x.name] = x
        self.shardings[product.x] = x  # for the rule alone: for all others it is replicated
        result = self._apply_rule(product.node)
        del self.shardings[product.x]
        return result

    def _check_chain(self, product: Product, total: int) -> None:
        """Require that a product after a row-parallel one of the same region be worth its all-reduce.

        Such a chain x W1 W2 W3 (column, row, column again) is allowed only where fewer numbers pass between the second
        and the third than the third has columns, as in squeeze-and-excitation.
        """
        # what a row-parallel product sends by its all-reduce: its number of output features
        rows = {row.node: self.graph.tensor(row.path).shape[row.outputs] for row in self.row_products}
        nearest = self.graph.nearest_products(product.x)
        for node in self.graph.ancestors(product.x) & rows.keys():
            self.require(
                node in nearest and rows[node] < total,
                f"{product.name}, with {total} columns, follows a row-parallel product of {rows[node]} columns",
            )

    # -- what rules ask of their call

    def shapes(self, node: fx.Node) -> list[tuple[int, int]]:
        return self.graph.shapes(node)

    def rank(self, node: fx.Node) -> int:
        return self.graph.rank(node)

    def sharding(self, value: Any) -> Sharding | None:
        """Return how a value is sharded; None if it is replicated."""
        return self.shardings.get(value) if isinstance(value, fx.Node) else None

    # -- what rules require. They return nothing: an unmet requirement ends the propagation after the rule, and the
    # first one is its result. So a rule reads as the list of its conditions, without a test after each.

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            self.add_problem(CannotShard(reason))

    def add_problem(self, problem: Problem) -> None:
        # the first problem: the following ones may be its consequences
        self._unmet = self._unmet or problem

    def copy_to_region(self, operand: fx.Node) -> None:
        """Let the region read a replicated value: each rank computes a part of its gradient, which is summed."""
        if operand in self.graph.has_gradient and operand.name not in self.edits.copied:
            self.edits.copied.append(operand.name)

    def shard_weight(self, node: fx.Node, path: str, sharding: Sharding) -> None:
        """Require that a stored tensor, which `node` reads, be sharded."""
        # a weight that several nodes of the region read has one part on each rank
        before = self.edits.weights.setdefault(path, sharding)
        self.require(
            before.pattern == sharding.pattern, f"{self.graph.names[path]} would be sharded in two different ways"
        )
        self.edits.weight_readers.setdefault(path, []).append(node.name)

    def shard_operand(
        self, node: fx.Node, operand: fx.Node, dim: int, sharding: Sharding, *, joined: bool = False
    ) -> None:
        """Require this rank's part of a replicated operand whose dimension `dim` (negative) meets a sharded one.

        An operand that broadcasts along the dimension is read as it is. joined: it is joined with the sharded one
        (`cat`, `stack`), not combined element by element.
        """
        # which of its elements a rank needs cannot be said
        if not self.graph.has_known_shape(operand):
            self.add_problem(_unknown_shape(operand))
            return
        shapes = self.shapes(operand)
        # counted from the end, because broadcasting aligns the last dimensions; negative: the operand lacks it
        dim += len(shapes)
        if dim < 0 or shapes[dim] == (1, 1):
            self.copy_to_region(operand)
            return
        sharding = sharding.on_dim(dim)
        self.require(
            all(length % sharding.period == 0 for length in shapes[dim]),
            f"{operand.name} has {shapes[dim][0]} elements, not a multiple of the {sharding.period} of the sharded "
            "dimension",
        )
        path = self.graph.stored(operand)
        # a stored vector of one period is sharded where it is stored, which also saves its memory
        if path and path not in self.kept_whole and shapes[dim] == (sharding.period, sharding.period):
            self.shard_weight(node, path, sharding)
            return
        row_nodes = [row.node for row in self.row_products]
        products = [each for each in self.graph.nearest_products(operand) if each not in row_nodes]
        # a computed operand could be sharded as well, if the products that it comes from are
        if products and not (joined and self.slice_joined):
            self.add_problem(MustShardTogether(tuple(products), joined))
        # Heads may meet a bias of their own, such as ALiBi's slopes. Single features would meet the residual stream,
        # which is replicated everywhere else.
        self.require(
            joined
            or sharding.columns_per_unit != 1
            or operand not in self.graph.has_gradient & self.graph.depends_on_input,
            f"{node.name} combines sharded features with {operand.name}, which is replicated",
        )
        self.copy_to_region(operand)
        self.edits.sliced[node.name, operand.name] = sharding

    def require_one_period(self, node: fx.Node, operand: fx.Node, x: Sharding) -> None:
        """Require that the sharded dimension be one period: else a rank's channels are in several places."""
        lengths = self.shapes(operand)[x.dim]
        repeats = f"{node.name} has {lengths[0]} channels, but the sharding pattern repeats every {x.period}"
        self.require(lengths == (x.period, x.period), repeats)

    def require_alike(self, one: Sharding, other: Sharding, node: fx.Node) -> None:
        """Require that two shardings that meet give each rank the same elements."""
        if one.blocks == other.blocks and one.inner == other.inner:
            return
        sizes = [[block * sharding.inner for block in sharding.blocks] for sharding in (one, other)]
        if one.period != other.period:
            self.require(False, f"{node.name} combines {one.period} sharded elements with {other.period}")
        elif sizes[0] == sizes[1]:
            # the same blocks in units of different size: alike where all blocks divide evenly
            self.require(
                one.is_even(self.size) and other.is_even(self.size),
                f"{node.name} combines {sizes[0]} elements in units of {one.inner} and of {other.inner}, "
                f"which do not divide evenly over {self.size} ranks",
            )
        else:
            # the one with fewer blocks must have those of the other
            ends = [{*itertools.accumulate(size)} for size in sizes]
            coarse, wanted = (one, ends[1]) if ends[1] - ends[0] else (other, ends[0])
            self.add_problem(coarse.with_block_ends(sorted(wanted), called(node)))

    def broadcast(self, node: fx.Node, operands: Sequence[fx.Node], rank: int, *, joined: bool = False) -> Sharding:
        """Return the sharding of a result of `rank` dimensions from operands that broadcast to it.

        Requires that sharded operands be sharded alike, and shards the replicated ones.
        """
        found: Sharding | None = None
        # replicated operands only now, because they follow the sharding that was found
        for operand in operands:
            if (sharding := self.sharding(operand)) is None:
                continue
            # aligned at the end, as broadcasting aligns shapes
            sharding = sharding.on_dim(sharding.dim + rank - self.rank(operand))
            if found is None:
                found = sharding
            elif found.dim != sharding.dim:
                self.require(False, f"dimensions {found.dim} and {sharding.dim} of {node.name} would both be sharded")
            else:
                self.require_alike(found, sharding, node)
        assert found is not None
        for operand in operands:
            if self.sharding(operand) is None:
                self.shard_operand(node, operand, found.dim - rank, found, joined=joined)
        return found

    # -- what rules change in their call

    def set_local_length(
        self, node: fx.Node, argument: tuple[int | str, ...], sharding: Sharding, periods: int = 1
    ) -> None:
        """Replace an argument by this rank's length."""
        length = LocalLength(node.name, argument, sharding, periods)
        if length not in self.edits.local_lengths:
            self.edits.local_lengths.append(length)

    def set_local_shape(self, node: fx.Node, lengths: Any, dim: int, sharding: Sharding) -> None:
        """Replace the length of dimension `dim` in a shape, given as a list or as single arguments; -1 and 1 stay."""
        listed = isinstance(lengths[0], list | tuple)
        given = lengths[0][dim] if listed else lengths[dim]
        # -1 is found anew from this rank's elements, and 1 is a dimension that has none of them
        if given not in (-1, 1):
            periods = given // sharding.period if isinstance(given, int) else 1
            self.set_local_length(node, (1, dim) if listed else (1 + dim,), sharding, periods)


def called(node: fx.Node) -> str:
    """Return the name of what a node calls, for messages."""
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def dim_of(node: fx.Node, place: int, default: Any = 0) -> Any:
    """Return the argument `dim` of a call, which is given at a place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)


def _unknown_shape(node: fx.Node) -> CannotShard:
    return CannotShard(f"the shape of {node.name} is known only at run time")


# -- the registry of rules

Rule = Callable[[Propagation, Any], Result]
UnaryRule = Callable[[Propagation, Any, Sharding], Result]
R = TypeVar("R", bound=Rule)
SHARDING_RULES: dict[Any, Rule] = {}
"""Function, name of a method, or type of a module -> what it does to shardings."""


def rule(*targets: Any) -> Callable[[R], R]:
    """Register the rule of calls of which any operand may be sharded; the shapes of all operands are known."""

    def register(function: R) -> R:
        def checked(p: Propagation, node: Any) -> Result:
            # rules compare lengths, which a shape of run time would leave open
            unknown = [operand for operand in node.all_input_nodes if not p.graph.has_known_shape(operand)]
            return _unknown_shape(unknown[0]) if unknown else function(p, node)

        SHARDING_RULES.update(dict.fromkeys(targets, checked))
        return function

    return register


def unary_rule(*targets: Any) -> Callable[[UnaryRule], UnaryRule]:
    """Register the rule of calls of which the first operand must be the sharded one; the rule gets its sharding."""

    def register(function: UnaryRule) -> UnaryRule:
        def checked(p: Propagation, node: Any) -> Result:
            if (x := p.sharding(node.args[0])) is None:
                return CannotShard(f"{node.name} reads a sharded value where it needs a replicated one")
            return function(p, node, x)

        SHARDING_RULES.update(dict.fromkeys(targets, checked))
        return function

    return register
