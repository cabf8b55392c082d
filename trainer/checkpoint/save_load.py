"""Saving and loading: what the ranks hold becomes one checkpoint directory, and comes back in any other layout."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onward.trainer.checkpoint import manifest
from onward.trainer.checkpoint import write_plan as pieces
from onward.trainer.checkpoint.manifest import CHUNK_BYTES, NUM_NAMED, Beat, FileEntry, Manifest, Stored, TensorEntry
from onward.trainer.checkpoint.manifest import TrainState as TrainState  # what `save` takes and `load` returns
from onward.trainer.checkpoint.write_plan import NAMED, Part, Piece, Plan, gather
from onward.trainer.checkpoint.write_plan import agree as agree  # whoever saves checks this first
from onward.trainer.distributed.placement import Box, Placement, overlap, slices
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import CheckpointError, Fenced, OnwardError
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import fsync

log = logging.getLogger(__name__)

SYNC_BYTES = 64 << 20
"""What a rank writes between two syncs with the disk and with the other ranks: on a slow disk a last sync of
everything would look like death, to the watchdog and to whoever waits."""
CHUNKS_PER_SYNC = 16
"""Chunks that a rank verifies before it hears of the others, for the same reason."""


# -- saving


def save(
    run: RunDir,
    *,
    attempt: int,
    state: TrainState,
    parts: Mapping[str, Part],
    mpi: MPIContext,
    beat: Beat = lambda: None,
) -> Path:
    """Write a checkpoint; when this returns, it is on the disk and survives a power cut. Collective: every rank.

    `parts` are what this rank holds, by the tensor's name. Ranks may hold the same pieces, or different ones, not such
    as overlap; together they hold every tensor. Each piece is written once. A whole checkpoint of the same step stays
    as it is. Raises, on every rank alike and leaving earlier checkpoints as they are, CheckpointError when the disk is
    full or fails or the parts do not fit together, and Fenced when a newer attempt owns the run directory.
    """
    saving = _Saving(run, attempt, state, mpi, parts, pieces.plan(parts, mpi), beat)
    try:
        if "there" in saving.together(saving.look) and not _why_not(saving.final, mpi=mpi, beat=beat):
            return saving.final
        saving.together(saving.begin)
        answers = saving.write()
        saving.together(lambda: saving.commit(answers))
    except OnwardError:
        if mpi.rank == 0:
            shutil.rmtree(saving.partial, ignore_errors=True)
        raise
    return saving.final


@dataclass(frozen=True)
class _Saving:
    """One call of `save` on one rank."""

    run: RunDir
    attempt: int
    state: TrainState
    mpi: MPIContext
    parts: Mapping[str, Part]
    plan: Plan
    beat: Beat

    @property
    def final(self) -> Path:
        return self.run.checkpoint(self.state.step)

    @property
    def partial(self) -> Path:
        return self.final.with_name(f"{self.final.name}.partial-{self.attempt:03d}")

    def together(self, act: Callable[[], str]) -> list[str]:
        """Act, and hear what every rank's act returned. If one raised, all ranks raise its error."""
        try:
            answer = f"ok {self._explained(act)}"
        except OnwardError as error:
            answer = f"{type(error).__name__} {error}"
        answers = [answer.partition(" ") for answer in gather(self.mpi, answer)]
        for kind, _, sentence in answers:
            if kind != "ok":
                raise (Fenced if kind == "Fenced" else CheckpointError)(sentence)
        return [sentence for _, _, sentence in answers]

    def _explained(self, act: Callable[[], str]) -> str:
        """Act; an error of the operating system becomes a sentence."""
        try:
            return act()
        except OSError as error:
            self.run.check_fence(self.attempt)  # a newer attempt sweeps away what this one writes
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = self._full() if full else "see to the disk, then resume"
            raise CheckpointError(
                f"step {self.state.step} could not be saved: {error.strerror}: {error.filename or self.partial}; "
                f"{reason}; earlier checkpoints are as they were"
            ) from error

    def _full(self) -> str:
        free = os.statvfs(self.run.checkpoints if self.run.checkpoints.exists() else self.run.root)
        return (
            f"a checkpoint takes {self.plan.num_bytes:,} bytes, {free.f_bavail * free.f_frsize:,} bytes and "
            f"{free.f_favail:,} inodes are free: make room, or lower checkpoint.keep_newest"
        )

    def look(self) -> str:
        """Rank 0 looks for a checkpoint of this step: "there" when there is one, whole or not."""
        if self.mpi.rank != 0:
            return ""
        self.run.check_fence(self.attempt)
        return "there" if self.final.exists() else ""

    def begin(self) -> str:
        """Rank 0 makes the directory."""
        if self.mpi.rank != 0:
            return ""
        self.run.checkpoints.mkdir(exist_ok=True)
        fsync(self.run.root)
        manifest.sweep(self.run, attempt=self.attempt)
        if shutil.disk_usage(self.run.checkpoints).free < self.plan.num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run.checkpoints))
        self.partial.mkdir()
        return ""

    def write(self) -> list[str]:
        """Every rank writes its share, all in step, so that none waits long for another; returns "bytes sha256" of
        each rank's file."""
        most = max(sum(piece.num_bytes for piece in share) for share in self.plan.shares)
        rounds = most // SYNC_BYTES + 2  # one for the header
        answers = [""]
        file, share = self.partial / _file_name(self.mpi.rank), self.plan.shares[self.mpi.rank]
        with contextlib.closing(_write(file, _chunks(share, self.parts), self.beat)) as syncs:
            for _ in range(rounds):
                answers = self.together(lambda: next(syncs))
        return answers

    def commit(self, answers: Sequence[str]) -> str:
        """Rank 0 writes the manifest and gives the directory its name."""
        if self.mpi.rank != 0:
            return ""
        files = tuple(
            FileEntry(name=_file_name(rank), bytes=int(size), sha256=digest, tensors={p.key: p.entry for p in share})
            for rank, (share, (size, digest)) in enumerate(zip(self.plan.shares, map(str.split, answers), strict=True))
        )
        for file in files:
            if (found := (self.partial / file.name).stat().st_size) != file.bytes:
                raise CheckpointError(f"{file.name} has {found:,} bytes on the disk, but {file.bytes:,} were written")
        whole = Manifest(world_size=self.mpi.world_size, state=self.state, tensors=self.plan.tensors, files=files)
        path = self.partial / "manifest.json"
        path.write_bytes(manifest.sealed(whole))
        fsync(path)
        fsync(self.partial)
        self.run.check_fence(self.attempt)
        if self.final.exists():
            manifest.set_aside(self.final)
        self.partial.rename(self.final)
        fsync(self.run.checkpoints)
        return ""


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write(path: Path, chunks: Iterable[bytes | memoryview], beat: Beat) -> Generator[str]:
    """Write a file in parts; after each part it is on the disk. Yields, for ever after the last, "bytes sha256";
    while it is not whole, ""."""
    digest, unsynced = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            unsynced += len(chunk)
            beat()
            if unsynced >= SYNC_BYTES:
                file.flush()
                os.fsync(file.fileno())
                unsynced = 0
                yield ""
        file.flush()
        os.fsync(file.fileno())
        answer = f"{file.tell()} {digest.hexdigest()}"
    while True:
        yield answer


def _chunks(pieces: Iterable[Piece], parts: Mapping[str, Part]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, header, pieces. Copies one piece at a time at most.

    https://github.com/huggingface/safetensors#format, written here because the library writes a file in one
    call: without a heartbeat, and hashed only by reading it again.
    """
    pieces = sorted(pieces, key=lambda piece: (-piece.itemsize, piece.key))  # so that all of them are aligned
    header: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.num_bytes
        header[piece.key] = {"dtype": piece.entry.dtype, "shape": piece.entry.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pieces are aligned, so that they can be used where they are mapped
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        content = piece.content(parts).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


# -- loading


def newest_whole(run: RunDir, *, mpi: MPIContext, beat: Beat = lambda: None) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are passed over with a warning. Collective: every rank.

    All get the oldest of their answers: a network file system may not yet show the newest one everywhere.
    """
    names = [path.name for path in manifest.list_checkpoints(run)]
    while oldest := min(gather(mpi, names[-1] if names else ""), key=_age):
        if not (problem := _why_not(run.checkpoints / oldest, mpi=mpi, beat=beat)):
            return run.checkpoints / oldest
        log.warning("passed over: %s", problem)
        names = [name for name in names if _age(name) < _age(oldest)]
    return None


def _age(name: str) -> tuple[int, str]:
    return len(name), name


def _why_not(path: Path, *, mpi: MPIContext, beat: Beat) -> str:
    """Why a checkpoint does not verify; "" when it does. Collective: every rank, all get the same answer.

    Ranks that see the same directory read a share of the files each.
    """
    try:
        seen = (path / "manifest.json").stat()
        sight = f"{seen.st_ino} {seen.st_mtime_ns}"
    except OSError:
        sight = ""
    same = len(set(gather(mpi, sight))) == 1  # if not, it was copied to several disks: each rank reads its own
    rank, world_size = (mpi.rank, mpi.world_size) if same else (0, 1)
    steps, answers = _verified(path, rank, world_size, beat), [""]
    while "" in answers:  # in step, so that none waits long for one with a large file
        answers = gather(mpi, next(steps))
    if problems := [answer for answer in answers if not answer.startswith("ok ")]:
        return problems[0]
    if len(set(answers)) > 1:
        return f"checkpoint {path} is another one on some ranks: SHA-256 of manifest.json is {', '.join(answers)}"
    return ""


def _verified(path: Path, rank: int, world_size: int, beat: Beat) -> Iterator[str]:
    """Yields "" now and then while reading, for ever after that "ok" and the manifest's digest, or what is wrong."""
    answer = ""
    try:
        for number, info in enumerate(manifest.verifying(path, rank=rank, world_size=world_size), 1):
            beat()
            if info:
                answer = f"ok {info.digest}"
            elif number % CHUNKS_PER_SYNC == 0:
                yield ""
    except (CheckpointError, OSError) as error:
        answer = str(error) or type(error).__name__
    while True:
        yield answer


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The whole shape of every tensor of a checkpoint, by name. Raises CheckpointError as `load` does."""
    return {name: entry.shape for name, entry in manifest.read_manifest(path).whole.items()}


def load(
    path: Path,
    wanted: Mapping[str, Placement] | None = None,
    *,
    mpi: MPIContext | None = None,
    beat: Beat = lambda: None,
) -> tuple[TrainState, dict[str, Tensor]]:
    """The position, and the wanted parts of tensors by name (of none given: every tensor, whole), on the CPU and where
    that is possible mapped from the files, after verifying them.

    Raises CheckpointError as `verify` does, and for wanted tensors that are missing or of another shape. Each rank for
    itself; with `mpi`, the ranks share the verification. Collective then: every rank, the same path.
    """
    if mpi is None:
        manifest.verify(path, beat=beat)
    elif problem := _why_not(path, mpi=mpi, beat=beat):
        raise CheckpointError(problem)
    stored = manifest.read_manifest(path)
    whole, found = stored.whole, stored.pieces()
    wanted = {name: Placement.whole(entry.shape) for name, entry in whole.items()} if wanted is None else wanted
    _refuse_others(path, whole, wanted)
    reads = {name: list(_reads(placement, found[name])) for name, placement in wanted.items()}
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as opened:
        files: dict[str, Any] = {}
        for file in {read.file for each in reads.values() for read in each}:
            try:
                files[file] = opened.enter_context(safe_open(path / file, "pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{path}: {file} is no safetensors file: {error}") from error
        for name, placement in wanted.items():
            tensors[name] = _assembled(placement.local_shape, whole[name], reads[name], files)
            beat()
    return stored.state, tensors


def _refuse_others(path: Path, whole: Mapping[str, TensorEntry], wanted: Mapping[str, Placement]) -> None:
    """Raises CheckpointError unless all wanted tensors are there, in their shape."""
    problems = [f"{name} is missing" for name in wanted if name not in whole]
    for name, placement in wanted.items():
        if name in whole and whole[name].shape != placement.shape:
            problems.append(f"{name} is {list(whole[name].shape)}, the model's is {list(placement.shape)}")
    if problems:
        raise CheckpointError(
            f"{path} is of another model: {len(problems)} of {len(wanted)} tensors are missing or of another shape: "
            f"{'; '.join(problems[:NUM_NAMED])}"
        )


class _Read(NamedTuple):
    """A box to be read."""

    file: str
    key: str
    source: Box
    """Where it is in the stored piece."""
    target: Box
    """Where it goes in the part."""


def _reads(placement: Placement, stored: Iterable[Stored]) -> Iterator[_Read]:
    """What the wanted part is made of."""
    for (local, place), piece in itertools.product(placement.boxes(), stored):
        common = overlap(place, piece.box)
        if common is not None:
            source = _moved(common, (-start for start, _ in piece.box))
            target = _moved(common, (to - start for (to, _), (start, _) in zip(local, place, strict=True)))
            yield _Read(piece.file, piece.key, source, target)


def _moved(box: Box, by: Iterable[int]) -> Box:
    return tuple((start + step, stop + step) for (start, stop), step in zip(box, by, strict=True))


def _assembled(shape: tuple[int, ...], entry: TensorEntry, reads: Sequence[_Read], files: Mapping[str, Any]) -> Tensor:
    """The part of that shape; mapped from the file when it lies in one piece."""
    whole = tuple((0, length) for length in shape)
    if len(reads) == 1 and reads[0].target == whole:
        mapped: Tensor = files[reads[0].file].get_slice(reads[0].key)[slices(reads[0].source)]
        return mapped
    part = torch.empty(shape, dtype=NAMED[entry.dtype])
    for read in reads:
        part[slices(read.target)] = files[read.file].get_slice(read.key)[slices(read.source)]
    return part
