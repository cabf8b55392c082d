"""Decide which rank writes which piece of a checkpoint.

    4 ranks, data 2 x tensor 2, ZeRO 1: a weight [8] of which tensor rank 0 holds [0:4] and tensor rank 1 holds [4:8];
    the replicas hold the same part of the weight, and each half of its optimizer state

              holds                                             writes
    rank 0    model/w [0:4]    optimizer/w/moment_1 [0:2]       optimizer/w/moment_1[0:2], model/w[0:4]
    rank 1    model/w [4:8]    optimizer/w/moment_1 [4:6]       optimizer/w/moment_1[4:6], model/w[4:8]
    rank 2    model/w [0:4]    optimizer/w/moment_1 [2:4]       optimizer/w/moment_1[2:4]
    rank 3    model/w [4:8]    optimizer/w/moment_1 [6:8]       optimizer/w/moment_1[6:8]

Every rank sends the list of what it holds to all others and computes the same plan from the lists. A piece with one
holder is written by it; a piece with several by the one that has the fewest bytes to write so far, the largest piece
first. So every piece is written once, and the files are of about equal size.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onward.trainer.checkpoint.manifest import TensorEntry, find_untiled, piece_key, shown_box
from onward.trainer.distributed.exchange import gather_bytes
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import NUM_NAMED, Box, Placement, overlap, slices
from onward.trainer.errors import CheckpointError, few

DTYPE_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"},
}
"""torch dtype -> its name in the safetensors format."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TensorPart = tuple[Tensor, Placement]
"""What a rank holds of a tensor: the plain local tensor, of the placement's `local_shape`."""


class Piece(NamedTuple):
    """A box of a tensor, written as one tensor of a file."""

    name: str
    box: Box
    key: str
    entry: TensorEntry
    ranks: tuple[int, ...]
    """The ranks that hold it."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.entry.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.entry.shape) * self.itemsize

    def content(self, parts: Mapping[str, TensorPart]) -> Tensor:
        """Return the piece, [*entry.shape], as a view of this rank's part."""
        tensor, placement = parts[self.name]
        assert tensor.shape == placement.local_shape, (self.name, tensor.shape, placement)
        local = next(local for local, box in placement.boxes() if box == self.box)
        return tensor.detach()[slices(local)]


@dataclass(frozen=True)
class WritePlan:
    """The pieces of a checkpoint and their writers; equal on every rank."""

    tensors: dict[str, TensorEntry]
    """Name -> the full tensor."""
    pieces: list[Piece]
    by_rank: list[list[Piece]]
    """The pieces that each rank writes."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def make_write_plan(parts: Mapping[str, TensorPart], mpi: MPIContext) -> WritePlan:
    """Make the plan for what the ranks hold. Collective: every rank.

    Raises CheckpointError, with the same text on every rank, unless the parts tile the tensors.
    """
    # intervals and not boxes: they are shorter, and every rank can compute the boxes
    held = {
        # as a string, because it is compared and looked up more often than it is parsed
        name: json.dumps([DTYPE_NAMES[tensor.dtype], placement.shape, placement.intervals], separators=(",", ":"))
        for name, (tensor, placement) in parts.items()
    }
    # compressed it is a few kB even for thousands of tensors: names and placements repeat
    return _plan(tuple(gather_bytes(mpi, zlib.compress(json.dumps(held).encode(), 1))))


@functools.lru_cache(maxsize=1)  # every save has the same lists; at 64 ranks a plan takes seconds
def _plan(listings: tuple[bytes, ...]) -> WritePlan:
    """Make the plan from the compressed list of each rank."""
    # replicas that hold the same send the same list, which is parsed once
    parsed = {listing: json.loads(zlib.decompress(listing)) for listing in set(listings)}
    holders: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, listing in enumerate(listings):
        for name, held in parsed[listing].items():
            # in the order of ranks, so that equal placements give equal keys of the cache in `_tiling`
            holders[name].append((rank, held))
    tensors: dict[str, TensorEntry] = {}
    pieces: list[Piece] = []
    problems: list[str] = []
    for name, by_rank in holders.items():
        tiling = _tiling(tuple(by_rank))
        if tiling.problem:
            problems.append(f"{name} {tiling.problem}")
        tensors[name] = tiling.full
        for box, (entry, ranks) in tiling.boxes.items():
            pieces.append(Piece(name, box, piece_key(name, box, tiling.full.shape), entry, ranks))
    if problems:
        raise CheckpointError(
            f"the pieces held by the ranks do not cover {len(problems)} tensors exactly once: "
            f"{'; '.join(problems[:NUM_NAMED])}"
        )
    return WritePlan(tensors, pieces, assign_writers(pieces, len(listings)))


class _Tiling(NamedTuple):
    """How the ranks hold one tensor."""

    full: TensorEntry
    boxes: dict[Box, tuple[TensorEntry, tuple[int, ...]]]
    """Box -> its dtype and shape, and the ranks that hold it."""
    problem: str
    """Why the boxes do not tile the tensor; "" if they do."""


@functools.lru_cache(maxsize=4096)  # most tensors of a model are divided in the same way as others
def _tiling(held: tuple[tuple[int, str], ...]) -> _Tiling:
    """Find the boxes of one tensor. held: (rank, dtype, shape and intervals as JSON), in the order of ranks."""
    # replicas have the same text, which is parsed once
    parsed = {text: json.loads(text) for _, text in held}
    dtype, shape, _ = parsed[held[0][1]]
    full = TensorEntry(dtype=dtype, shape=shape)
    ranks: dict[Box, list[int]] = defaultdict(list)
    problem = ""
    for rank, text in held:
        # intervals may differ between ranks, dtype and full shape may not
        if parsed[text][:2] != [dtype, shape]:
            problem = "is {} {} on rank {}, ".format(*parsed[text][:2], rank) + f"{dtype} {shape} on rank {held[0][0]}"
        intervals = tuple(tuple((start, stop) for start, stop in each) for each in parsed[text][2])
        for _, box in Placement(full.shape, intervals).boxes():
            ranks[box].append(rank)
    if not problem and (untiled := find_untiled(tuple(ranks), full.shape)):
        box, _ = untiled
        # pieces that overlap without being equal, or none at all
        holders = [f"{shown_box(each)} on {shown(on)}" for each, on in ranks.items() if overlap(each, box) is not None]
        found = f"in different pieces, {' and '.join(holders)}" if holders else "on no rank"
        problem = f"{shown_box(box)} is {found}"
    entries = {box: TensorEntry(dtype=dtype, shape=tuple(stop - start for start, stop in box)) for box in ranks}
    return _Tiling(full, {box: (entries[box], tuple(on)) for box, on in ranks.items()}, problem)


def assign_writers(pieces: Iterable[Piece], num_ranks: int) -> list[list[Piece]]:
    """Return, for each rank, the pieces that it writes, with about equal bytes on all ranks."""
    by_rank: list[list[Piece]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    # pieces without a choice first, then the largest first: the small ones at the end even out the totals
    for piece in sorted(pieces, key=lambda piece: (len(piece.ranks) > 1, -piece.num_bytes, piece.key)):
        writer = min(piece.ranks, key=totals.__getitem__)
        by_rank[writer].append(piece)
        totals[writer] += piece.num_bytes
    return by_rank


def shown(ranks: Sequence[int]) -> str:
    """Return ranks as text: "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {few(ranks, 8)}"
