"""Which part of a whole tensor a rank holds: intervals along each dimension, in the order they lie in its memory.

    Placement((6, 4), (((0, 1), (2, 3), (4, 5)), ((0, 4),)))      rows 0, 2 and 4 of a [6, 4] tensor, all columns

A fused query-key-value weight divided over two ranks is such a thing: half of each of its three blocks. What a
checkpoint holds, and what another layout asks of it, are both placements; so nothing else has to know of layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Interval = tuple[int, int]
"""First index, and the one after the last."""
Box = tuple[Interval, ...]
"""One interval for each dimension."""


class Sliceable(Protocol):
    """A tensor, an array, or a slice of a safetensors file."""

    def __getitem__(self, index: Any, /) -> Any: ...


T = TypeVar("T", bound=Sliceable)


@dataclass(frozen=True)
class Placement:
    """A part of a tensor of shape `shape`: the product of the intervals held along each dimension."""

    shape: tuple[int, ...]
    intervals: tuple[tuple[Interval, ...], ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Placement:
        """All of it."""
        return Placement(tuple(shape), tuple(((0, length),) for length in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(stop - start for start, stop in held) for held in self.intervals)

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    def narrow(self, dim: int, start: int, stop: int) -> Placement:
        """The part of this part from `start` to `stop` along `dim`, counted in the part."""
        held, offset = [], 0
        for first, last in self.intervals[dim]:
            low, high = max(start - offset, 0), min(stop - offset, last - first)
            if low < high:
                held.append((first + low, first + high))
            offset += last - first
        return Placement(self.shape, (*self.intervals[:dim], tuple(held), *self.intervals[dim + 1 :]))

    def divide(self, dim: int, blocks: Sequence[int], rank: int, size: int) -> Placement:
        """Rank `rank`'s of `size` shares of this part along `dim`: its stretch of each of the consecutive `blocks`,
        whose lengths add up to the part's. Shares of a block differ by one at most."""
        assert sum(blocks) == self.local_shape[dim], (blocks, self.local_shape, dim)
        held: list[Interval] = []
        offset = 0
        for length in blocks:
            start, stop = share(length, rank, size)
            held += self.narrow(dim, offset + start, offset + stop).intervals[dim]
            offset += length
        joined: list[Interval] = []
        for start, stop in held:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return Placement(self.shape, (*self.intervals[:dim], tuple(joined), *self.intervals[dim + 1 :]))

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """(where in the part, where in the whole) of each contiguous piece; none when the part is empty."""
        dims = []
        for held in self.intervals:
            ends = list(itertools.accumulate(stop - start for start, stop in held))
            pairs = zip(held, ends, strict=True)
            dims.append([((end - (stop - start), end), (start, stop)) for (start, stop), end in pairs])
        for choice in itertools.product(*dims):
            yield tuple(local for local, _ in choice), tuple(place for _, place in choice)

    def take(self, whole: T) -> list[tuple[Box, T]]:
        """(where in the part, its content) of each piece, cut out of the whole tensor."""
        return [(local, whole[slices(place)]) for local, place in self.boxes()]


def share(length: int, rank: int, size: int) -> Interval:
    """Rank `rank`'s stretch of `length` divided over `size`; stretches differ by one at most."""
    return length * rank // size, length * (rank + 1) // size


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None
