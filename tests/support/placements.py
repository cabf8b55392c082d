"""What a rank holds of a tensor that ranks share along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

from onward.trainer.distributed.weights import Interval, Placement, share


def share_of(placement: Placement, dim: int, blocks: Sequence[int], rank: int, size: int) -> Placement:
    """Return the placement of rank `rank` when `size` ranks shard the local tensor along `dim`.

    blocks: lengths of consecutive blocks that fill the dimension; the rank holds its interval of each of them.
    """
    assert sum(blocks) == placement.local_shape[dim], (blocks, placement.local_shape, dim)
    held: list[Interval] = []
    offset = 0
    for length in blocks:
        # each block is divided by itself, such as the queries, keys and values of a fused weight
        start, stop = share(length, rank, size)
        held += placement.narrow(dim, offset + start, offset + stop).intervals[dim]
        offset += length
    # merge neighbouring intervals, so that equal parts have equal placements
    joined: list[Interval] = []
    for start, stop in held:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return Placement(placement.shape, (*placement.intervals[:dim], tuple(joined), *placement.intervals[dim + 1 :]))
