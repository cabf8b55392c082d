"""Verify and load checkpoints with all ranks: each rank gets the parts that its layout needs.

stored pieces of model/w [8]             wanted by a rank of another layout: rows 2 to 6

rank-00000.safetensors   [0:4]           [2:4] from the first file, [4:6] from the second, copied into a tensor
rank-00001.safetensors   [4:8]           of shape [4]; a part that lies in one piece is memory-mapped
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from onward.trainer.checkpoint.manifest import Beat, StoredPiece, TensorEntry
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.verification import VerifiedCheckpoint, verifying
from onward.trainer.checkpoint.write_plan import DTYPES
from onward.trainer.distributed.exchange import gather, in_rounds
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import NUM_NAMED, Box, Placement, check_fit, overlap, slices
from onward.trainer.errors import CheckpointError

CHUNKS_PER_ROUND = 16
"""Chunks that a rank verifies before it exchanges results with the others, so that none waits for long."""


# -- verifying


def verify_together(
    path: Path, *, mpi: MPIContext, beat: Beat = lambda: None, group: ProcessGroup | None = None
) -> VerifiedCheckpoint:
    """Verify a checkpoint. Collective: every rank, the same path. group: all ranks; None = the world.

    Ranks that see the same directory each read a share of the files. Raises CheckpointError, with the same text on
    every rank, with what is wrong.
    """
    try:
        stat = (path / "manifest.json").stat()
        # the same inode and time: a shared file system, where one rank can read each file for all
        seen = f"{stat.st_ino} {stat.st_mtime_ns}"
    except OSError:
        seen = ""
    # if the ranks see different files, the checkpoint was copied to several disks, and each rank reads its own
    same = len(set(gather(mpi, seen, group))) == 1
    rank, world_size = (mpi.rank, mpi.world_size) if same else (0, 1)
    verified: list[VerifiedCheckpoint] = []

    def work() -> Iterator[str]:
        """Yield "" now and then, at last "ok" and the digest of the manifest, or what is wrong."""
        try:
            # an error is a result as well: raised here, it would leave the other ranks waiting in their exchange
            for number, checkpoint in enumerate(verifying(path, rank=rank, world_size=world_size), 1):
                beat()
                if checkpoint:
                    verified.append(checkpoint)
                    yield f"ok {checkpoint.info.digest}"
                elif number % CHUNKS_PER_ROUND == 0:
                    yield ""
        except (CheckpointError, OSError) as error:
            yield str(error) or type(error).__name__

    results = in_rounds(work(), lambda advance: gather(mpi, advance(), group))
    if problems := [result for result in results if not result.startswith("ok ")]:
        raise CheckpointError(problems[0])
    # each rank has verified its own copy: they are complete, but may be of different runs
    if len(set(results)) > 1:
        raise CheckpointError(
            f"checkpoint {path} is not the same on all ranks: SHA-256 of manifest.json is {', '.join(results)}; copy "
            "one of them to all hosts"
        )
    return verified[0]


# -- loading


def load(
    checkpoint: VerifiedCheckpoint,
    wanted: Mapping[str, Placement] | None = None,
    *,
    beat: Beat = lambda: None,
) -> tuple[TrainState, dict[str, Tensor]]:
    """Return the position and the wanted parts by checkpoint key, on the CPU; None is every tensor, in full.

    A part that lies in one stored piece is mapped from its file. Raises CheckpointError for wanted tensors that are
    missing or of another shape. Not collective.
    """
    path = checkpoint.path
    full = checkpoint.manifest.full_tensors
    stored = checkpoint.manifest.pieces()
    if wanted is None:
        wanted = {key: Placement.full(entry.shape) for key, entry in full.items()}
    expected = {key: placement.shape for key, placement in wanted.items()}
    # a checkpoint may have more than is wanted, such as an optimizer's state for an export
    check_fit(f"checkpoint {path}", checkpoint.shapes, expected, partial=True)
    reads = {key: list(_reads(placement, stored[key])) for key, placement in wanted.items()}
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as opened:
        files: dict[str, Any] = {}
        # only the files that have a wanted piece are opened
        for file in {read.file for each in reads.values() for read in each}:
            try:
                files[file] = opened.enter_context(safe_open(path / file, "pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{path}: {file} is not a safetensors file: {error}") from error
        for key, placement in wanted.items():
            tensors[key] = _assemble(placement.local_shape, full[key], reads[key], files)
            beat()
    return checkpoint.manifest.state, tensors


class _Read(NamedTuple):
    """A box to be copied from a stored piece into a part."""

    file: str
    key: str
    source: Box
    """In the stored piece."""
    target: Box
    """In the part."""


def _reads(placement: Placement, stored: Iterable[StoredPiece]) -> Iterator[_Read]:
    """Yield the intersections of a wanted part with the stored pieces."""
    for (local, box), piece in itertools.product(placement.boxes(), stored):
        # boxes are those of the full tensor, and are moved to where the piece and the part have them
        common = overlap(box, piece.box)
        if common is not None:
            source = _moved(common, (-start for start, _ in piece.box))
            target = _moved(common, (to - start for (to, _), (start, _) in zip(local, box, strict=True)))
            yield _Read(piece.file, piece.key, source, target)


def _moved(box: Box, by: Iterable[int]) -> Box:
    return tuple((start + step, stop + step) for (start, stop), step in zip(box, by, strict=True))


def _assemble(shape: tuple[int, ...], entry: TensorEntry, reads: Sequence[_Read], files: Mapping[str, Any]) -> Tensor:
    """Return the part of that shape; memory-mapped if it lies in one piece."""
    full = tuple((0, length) for length in shape)
    # no copy: a safetensors slice is mapped, and is read when it is copied into the weight
    if len(reads) == 1 and reads[0].target == full:
        mapped: Tensor = files[reads[0].file].get_slice(reads[0].key)[slices(reads[0].source)]
        return mapped
    part = torch.empty(shape, dtype=DTYPES[entry.dtype])
    for read in reads:
        part[slices(read.target)] = files[read.file].get_slice(read.key)[slices(read.source)]
    return part


# -- comparing


def differences(one: VerifiedCheckpoint, other: VerifiedCheckpoint) -> list[str]:
    """Return a clause for the first tensors, in the order of the model, that do not have the same bits; [] = none."""
    found = []
    shapes = one.shapes
    for name in {**shapes, **other.shapes}:
        if shapes.get(name) != other.shapes.get(name):
            found.append(f"{name} has the shape {shapes.get(name)} in one, {other.shapes.get(name)} in the other")
            continue
        # one tensor at a time, so that two models need not fit into memory
        placement = {name: Placement.full(shapes[name])}
        a = load(one, placement)[1][name]
        b = load(other, placement)[1][name]
        if a.dtype != b.dtype:
            found.append(f"{name} is {a.dtype} in one, {b.dtype} in the other")
        # bits, not values: NaN differs from itself, and -0 equals 0
        elif not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
            changed = int((a != b).sum())
            apart = f", by up to {float((a.double() - b.double()).abs().max()):.3g}" if changed else ""
            found.append(f"{name}: {changed} of {a.numel()} elements{apart}")
        if len(found) > NUM_NAMED:
            return [*found[:NUM_NAMED], "and more"]
    return found
