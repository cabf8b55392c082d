"""Who holds which piece of the stored tensors, who writes it, and whether all its copies are the same.

rank 0   model/w [0:4]     optimizer/w/exp_avg [0:2]        each piece is written once, by one of its holders;
rank 1   model/w [0:4]     optimizer/w/exp_avg [2:4]        by which one, every rank works out from what all of
rank 2   model/w [4:8]     optimizer/w/exp_avg [4:6]        them say they hold
rank 3   model/w [4:8]     optimizer/w/exp_avg [6:8]
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
import torch.distributed as dist
from torch import Tensor

from onward.trainer.checkpoint.manifest import NUM_NAMED, Beat, TensorEntry, piece_key, uneven
from onward.trainer.distributed.placement import Box, Placement, overlap, slices
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import CheckpointError, TrainingFailed

ANSWER_BYTES = 1024
"""Longest sentence that a rank tells the others."""

DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"},
}
"""torch's types and their names in the safetensors format."""
NAMED = {name: dtype for dtype, name in DTYPES.items()}

Part = tuple[Tensor, Placement]
"""What a rank holds of a tensor: the plain local tensor, of the placement's `local_shape`."""


# -- who writes what


class Piece(NamedTuple):
    """A box of a tensor: what is written, and checked, at once."""

    name: str
    box: Box
    key: str
    entry: TensorEntry
    ranks: tuple[int, ...]
    """Who holds it."""

    @property
    def itemsize(self) -> int:
        return NAMED[self.entry.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.entry.shape) * self.itemsize

    def content(self, parts: Mapping[str, Part]) -> Tensor:
        """The piece as a view of this rank's part."""
        tensor, placement = parts[self.name]
        assert tensor.shape == placement.local_shape, (self.name, tensor.shape, placement)
        local = next(local for local, place in placement.boxes() if place == self.box)
        return tensor.detach()[slices(local)]


@dataclass(frozen=True)
class Plan:
    """What a checkpoint is made of, the same on every rank."""

    tensors: dict[str, TensorEntry]
    """Name -> the whole tensor."""
    pieces: list[Piece]
    shares: list[list[Piece]]
    """For each rank, what it writes."""

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def plan(parts: Mapping[str, Part], mpi: MPIContext) -> Plan:
    """Who writes what. Raises CheckpointError, on every rank alike. Collective: every rank."""
    held = {
        # a string, for it is compared and looked up more often than it is read
        name: json.dumps([DTYPES[tensor.dtype], placement.shape, placement.intervals], separators=(",", ":"))
        for name, (tensor, placement) in parts.items()
    }
    # a few kB even for thousands of tensors: names and placements repeat
    return _planned(tuple(gather_bytes(mpi, zlib.compress(json.dumps(held).encode(), 1))))


@functools.lru_cache(maxsize=1)  # at 64 ranks with all weights and optimizer states divided this takes seconds
def _planned(listings: tuple[bytes, ...]) -> Plan:
    """The plan that follows from what each rank holds."""
    read = {listing: json.loads(zlib.decompress(listing)) for listing in set(listings)}
    holders: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, listing in enumerate(listings):
        for name, held in read[listing].items():
            holders[name].append((rank, held))
    tensors: dict[str, TensorEntry] = {}
    pieces: list[Piece] = []
    problems: list[str] = []
    for name, by_rank in holders.items():
        layout = _layout(tuple(by_rank))
        if layout.problem:
            problems.append(f"{name} {layout.problem}")
        tensors[name] = layout.whole
        for box, (entry, ranks) in layout.boxes.items():
            pieces.append(Piece(name, box, piece_key(name, box, layout.whole.shape), entry, ranks))
    if problems:
        raise CheckpointError(
            f"what the ranks hold of {len(problems)} tensors does not make them up: {'; '.join(problems[:NUM_NAMED])}"
        )
    return Plan(tensors, pieces, partition(pieces, len(listings)))


class _Layout(NamedTuple):
    """How the ranks that hold parts of a tensor hold it."""

    whole: TensorEntry
    boxes: dict[Box, tuple[TensorEntry, tuple[int, ...]]]
    """Of each piece, what it is and who holds it."""
    problem: str


@functools.lru_cache(maxsize=4096)  # most tensors of a model are divided like others
def _layout(held: tuple[tuple[int, str], ...]) -> _Layout:
    """held: (rank, what it holds, as JSON), in the order of ranks."""
    read = {text: json.loads(text) for _, text in held}
    dtype, shape, _ = read[held[0][1]]
    whole = TensorEntry(dtype=dtype, shape=shape)
    ranks: dict[Box, list[int]] = defaultdict(list)
    problem = ""
    for rank, text in held:
        if read[text][:2] != [dtype, shape]:
            problem = "is {} {} on rank {}, ".format(*read[text][:2], rank) + f"{dtype} {shape} on rank {held[0][0]}"
        intervals = tuple(tuple((start, stop) for start, stop in each) for each in read[text][2])
        for _, box in Placement(whole.shape, intervals).boxes():
            ranks[box].append(rank)
    if not problem and (wrong := uneven(tuple(ranks), whole.shape)):
        place, _ = wrong
        those = [f"{_slice(box)} on {_ranks(on)}" for box, on in ranks.items() if overlap(box, place) is not None]
        problem = f"{_slice(place)} is " + (f"in different pieces, {' and '.join(those)}" if those else "on no rank")
    entries = {box: TensorEntry(dtype=dtype, shape=tuple(stop - start for start, stop in box)) for box in ranks}
    return _Layout(whole, {box: (entries[box], tuple(on)) for box, on in ranks.items()}, problem)


def partition(pieces: Iterable[Piece], num_ranks: int) -> list[list[Piece]]:
    """For each rank what it writes: each piece is one of its holders', and the shares are about equal in bytes.

    What a single rank holds is its; of the rest the largest first, each to the holder that has least.
    """
    shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for piece in sorted(pieces, key=lambda piece: (len(piece.ranks) > 1, -piece.num_bytes, piece.key)):
        writer = min(piece.ranks, key=totals.__getitem__)
        shares[writer].append(piece)
        totals[writer] += piece.num_bytes
    return shares


def _slice(box: Box) -> str:
    return f"[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {named}"


# -- agreeing


WORDS = 1 << 18
"""Words of 4 bytes that are summed at once: what comes in between takes twice their room."""


def agree(parts: Mapping[str, Part], mpi: MPIContext, *, beat: Beat = lambda: None) -> None:
    """Raise unless ranks that hold the same piece hold the same bits of it. Collective: every rank.

    Compares a checksum of each such piece. Raises, on every rank alike, TrainingFailed when replicas have drifted
    apart, and CheckpointError when the pieces do not make up the tensors.
    """
    whole = plan(parts, mpi)
    copied = [piece for piece in whole.pieces if len(piece.ranks) > 1]
    sums = []
    for piece in copied:
        if mpi.rank in piece.ranks:
            sums.append(_checksum(piece.content(parts)))
            beat()
    flat = torch.stack(sums).cpu() if sums else torch.empty(0, dtype=torch.int64)
    found = [iter(memoryview(numbers).cast("q")) for numbers in gather_bytes(mpi, flat.numpy().tobytes())]
    drifted: dict[str, str] = {}
    for piece in copied:
        groups: dict[int, list[int]] = defaultdict(list)
        for rank in piece.ranks:
            groups[next(found[rank])].append(rank)
        if len(groups) > 1:
            fewest_first = sorted(groups.values(), key=len)
            drifted.setdefault(piece.name, f"{piece.key} on {' is not that on '.join(map(_ranks, fewest_first))}")
    if drifted:
        raise TrainingFailed(
            f"{len(drifted)} of {len(whole.tensors)} tensors differ between ranks that must hold the same bits: "
            f"{'; '.join(list(drifted.values())[:NUM_NAMED])}; the newest checkpoint is from before that"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """A sum of the bits in words of 4 bytes, each weighted by its place: equal tensors agree, swaps do not."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    if odd := -len(content) % 4:
        content = torch.nn.functional.pad(content, (0, odd))
    elif content.storage_offset() % 4:
        content = content.clone()
    weights = _weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for words in torch.split(content.view(torch.int32), WORDS):
        total = total * 1_000_003 + (words * weights[: len(words)]).sum()  # modulo 2^64
    return total


@functools.lru_cache(maxsize=1)
def _weights(device: torch.device) -> Tensor:
    return torch.arange(1, WORDS + 1, device=device)


# -- what the ranks tell each other


def gather(mpi: MPIContext, text: str) -> list[str]:
    """Every rank's text, cut at ANSWER_BYTES. Collective: every rank."""
    mine = bytearray(text.encode()[:ANSWER_BYTES].ljust(ANSWER_BYTES, b"\0"))
    texts = _all_gather(mpi, torch.frombuffer(mine, dtype=torch.uint8))
    return [text.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for text in texts]


def gather_bytes(mpi: MPIContext, content: bytes) -> list[bytes]:
    """Every rank's bytes, however many. Collective: every rank."""
    sizes = [int(size) for size in _all_gather(mpi, torch.tensor(len(content)))]
    mine = bytearray(content.ljust(max(1, *sizes), b"\0"))
    padded = _all_gather(mpi, torch.frombuffer(mine, dtype=torch.uint8))
    return [bytes_.numpy().tobytes()[:size] for bytes_, size in zip(padded, sizes, strict=True)]


def _all_gather(mpi: MPIContext, mine: Tensor) -> list[Tensor]:
    if mpi.world_size == 1:
        return [mine]
    found = [torch.empty_like(mine) for _ in range(mpi.world_size)]
    dist.all_gather(found, mine)
    return found
