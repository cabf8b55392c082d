"""How one dimension of a tensor is sharded over the tensor-parallel ranks, and why it cannot be.

    Sharding(dim=1, blocks=(4, 4), inner=2) over 2 ranks: every 16 elements along dim 1 are

    element   0  1  2  3  4  5  6  7    8  9 10 11 12 13 14 15
    unit      0  0  1  1  2  2  3  3    4  4  5  5  6  6  7  7       a unit is `inner` elements, never separated
    block     0  0  0  0  0  0  0  0    1  1  1  1  1  1  1  1       each block is divided over all ranks
    rank      0  0  0  0  1  1  1  1    0  0  0  0  1  1  1  1

The blocks of a fused query-key-value weight are the query, the key and the value: each rank needs its heads of all
three. A unit is one head of 16 features, or the 4 x 4 pixels of one channel after Flatten. The pattern may repeat
along the dimension: with samples and heads merged into one dimension, each sample is one period.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.fx

from onward.trainer.distributed.weights import Interval, Placement, share


@dataclass(frozen=True)
class Sharding:
    """One dimension as [repeats x] blocks x inner elements: every rank has its share of the units of each block.

    32 channels of 4 x 4 pixels, flattened      dim 1, blocks (32,), inner 16
    query, key and value in one                 dim 2, blocks (64, 64, 64), inner 1
    """

    dim: int
    blocks: tuple[int, ...]
    """Units of each block."""
    inner: int = 1
    """Elements of a unit."""
    weight: str = ""
    """The column-parallel weight whose output columns the units are, while they are consecutive columns of one."""
    first_column: int = 0
    columns_per_unit: int = 0
    """0: the units are no longer consecutive columns of one weight."""

    @property
    def num_units(self) -> int:
        return sum(self.blocks)

    @property
    def period(self) -> int:
        """Elements after which the pattern repeats."""
        return self.num_units * self.inner

    @property
    def pattern(self) -> tuple[int, tuple[int, ...], int]:
        """All that decides which elements a rank has, without the weight that they come from."""
        return self.dim, self.blocks, self.inner

    def on_dim(self, dim: int) -> Sharding:
        return replace(self, dim=dim)

    def is_even(self, size: int) -> bool:
        """Whether each of `size` ranks has the same number of units of every block."""
        return all(block % size == 0 for block in self.blocks)

    def intervals(self, rank: int, size: int) -> list[Interval]:
        """Return the intervals of each period that a rank has, in order; neighbours are joined."""
        starts = itertools.accumulate(self.blocks, initial=0)
        joined: list[Interval] = []
        for start, block in zip(starts, self.blocks, strict=False):
            first, last = ((start + end) * self.inner for end in share(block, rank, size))
            # intervals touch where other ranks have nothing of a small block
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            elif first < last:
                joined.append((first, last))
        return joined

    def local_length(self, rank: int, size: int) -> int:
        """Elements of each period that a rank has."""
        return sum(stop - start for start, stop in self.intervals(rank, size))

    def placement(self, shape: Sequence[int], rank: int, size: int) -> Placement:
        """Return the part of a stored tensor of this shape that a rank holds."""
        full = Placement.full(shape).intervals
        return Placement(tuple(shape), (*full[: self.dim], tuple(self.intervals(rank, size)), *full[self.dim + 1 :]))

    def with_block_ends(self, ends: Sequence[int], call: str, otherwise: str = "") -> Problem:
        """Return what is missing for blocks to end at these elements, too.

        That is NeedsFinerBlocks where the weight's columns can be divided so, else CannotShard.
        call: the operation that needs it. otherwise: the message if finer blocks do not help.
        """
        # in units: blocks end between units alone
        present = {*itertools.accumulate(self.blocks)}
        wanted = {end // self.inner for end in ends}
        cuts_units = any(end % self.inner for end in ends)
        # finer blocks do not help: the units are no columns of one weight, would be cut, or end there already
        if not self.columns_per_unit or cuts_units or wanted <= present:
            at = f"at {sorted(ends)} of {self.period} elements"
            return CannotShard(otherwise or f"{call} splits the sharded dimension {at}, not between blocks")
        cuts = frozenset(self.first_column + end * self.columns_per_unit for end in wanted)
        return NeedsFinerBlocks(self.weight, cuts, otherwise)


# -- what a rule may return in place of a sharding


@dataclass(frozen=True)
class Replicated:
    """The output is the same on all ranks: it is a number, or the sum of the ranks' partial results."""


@dataclass(frozen=True)
class CannotShard:
    """The region ends here: its weights stay replicated."""

    reason: str
    """Shown by `onward plan` behind the name of the weight."""


@dataclass(frozen=True)
class NeedsFinerBlocks:
    """The region may work if the columns of a weight are divided block by block.

    One weight [inputs, 96] for query, key and value, over 2 ranks; its output is then split into three:

        ranks    000000000000000000000000 111111111111111111111111     one block: rank 0 has no value
        ranks    00000000 11111111 | 00000000 11111111 | 00000000 11111111     cuts {32, 64}
    """

    weight: str
    cuts: frozenset[int]
    """Columns at which a new block begins."""
    otherwise: str = ""
    """The reason to report if it does not help."""


@dataclass(frozen=True)
class MustShardTogether:
    """The region may work if these products are column-parallel, too: their output meets a sharded one.

    x --- gate --- silu --- mul --- down        gate alone cannot be sharded: mul reads sharded and replicated
    x --- up -----------------'                 features; gate and up together can
    """

    products: tuple[torch.fx.Node, ...]
    joined: bool = False
    """Whether they meet in a `cat` or `stack`. Then a rank can also take its part of what stays replicated."""


Problem = CannotShard | NeedsFinerBlocks | MustShardTogether
Result = Sharding | list[Sharding] | Replicated | Problem
"""Of a rule: the sharding of the call's output, a list of those of its outputs, or why it cannot be sharded."""
