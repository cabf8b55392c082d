"""Saving and loading: the ranks' tensors become one checkpoint directory, and come back on any number of ranks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer import manifest
from trainer.distributed import MPIContext
from trainer.errors import CheckpointError, Fenced, OnwardError
from trainer.manifest import CHUNK_BYTES, Beat, FileEntry, Manifest, TensorEntry
from trainer.manifest import TrainState as TrainState  # what `save` takes and `load` returns
from trainer.run import RunDir, fsync

SYNC_BYTES = 64 << 20
"""What a rank writes between two syncs with the disk and with the other ranks: on a slow disk a last sync of
everything would look like death, to the watchdog and to whoever waits."""
ANSWER_BYTES = 1024
"""Longest sentence that a rank tells the others."""

DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"},
}
"""torch's types and their names in the safetensors format."""


# -- saving


def save(
    run: RunDir,
    *,
    attempt: int,
    state: TrainState,
    tensors: Mapping[str, torch.Tensor],
    mpi: MPIContext,
    beat: Beat = lambda: None,
) -> Path:
    """Write a checkpoint; when this returns, it is on the disk and survives a power cut. Collective: every rank.

    `tensors` are the same on every rank; each writes its share. A whole checkpoint of the same step stays as it
    is. Raises, on every rank alike and leaving earlier checkpoints as they are, CheckpointError when the disk is
    full or fails, and Fenced when a newer attempt owns the run directory.
    """
    saving = _Saving(run, attempt, state, mpi, tensors, beat)
    try:
        if "kept" not in saving.together(saving.begin):
            files = saving.write()
            saving.together(lambda: saving.commit(files))
    except OnwardError:
        if mpi.rank == 0:
            shutil.rmtree(saving.partial, ignore_errors=True)
        raise
    return saving.final


def partition(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Divide names into `parts` lists of about the same total size: the largest first, each to the smallest list."""
    lists: list[list[str]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = totals.index(min(totals))
        lists[least].append(name)
        totals[least] += sizes[name]
    return lists


@dataclass(frozen=True)
class _Saving:
    """One call of `save` on one rank."""

    run: RunDir
    attempt: int
    state: TrainState
    mpi: MPIContext
    tensors: Mapping[str, torch.Tensor]
    beat: Beat

    @property
    def final(self) -> Path:
        return self.run.checkpoint(self.state.step)

    @property
    def partial(self) -> Path:
        return self.final.with_name(f"{self.final.name}.partial-{self.attempt:03d}")

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def together(self, act: Callable[[], str]) -> list[str]:
        """Act, and hear what every rank's act returned. If one raised, all ranks raise its error."""
        try:
            answer = f"ok {self._explained(act)}"
        except OnwardError as error:
            answer = f"{type(error).__name__} {error}"
        answers = [answer.partition(" ") for answer in _gather(self.mpi, answer)]
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
            f"a checkpoint takes {self.num_bytes:,} bytes, {free.f_bavail * free.f_frsize:,} bytes and "
            f"{free.f_favail:,} inodes are free: make room, or lower checkpoint.keep_newest"
        )

    def begin(self) -> str:
        """Rank 0 makes the directory; "kept" when there is a whole one already."""
        if self.mpi.rank != 0:
            return ""
        self.run.check_fence(self.attempt)
        if self.final.exists() and manifest.is_whole(self.final, beat=self.beat):
            return "kept"
        self.run.checkpoints.mkdir(exist_ok=True)
        fsync(self.run.root)
        manifest.sweep(self.run, attempt=self.attempt)
        if shutil.disk_usage(self.run.checkpoints).free < self.num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run.checkpoints))
        self.partial.mkdir()
        return ""

    def write(self) -> list[FileEntry]:
        """Every rank writes its share, all in step, so that none waits long for another; returns what was written."""
        sizes = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        shares = [
            {name: self.tensors[name] for name in sorted(names, key=lambda name: (-self.tensors[name].itemsize, name))}
            for names in partition(sizes, self.mpi.world_size)
        ]
        rounds = max(sum(sizes[name] for name in share) for share in shares) // SYNC_BYTES + 2  # one for the header
        names = [f"rank-{rank:05d}.safetensors" for rank in range(self.mpi.world_size)]
        answers = [""]
        with contextlib.closing(_write(self.partial / names[self.mpi.rank], shares[self.mpi.rank], self.beat)) as parts:
            for _ in range(rounds):
                answers = self.together(lambda: next(parts))
        return [
            FileEntry(name=name, bytes=int(size), sha256=digest, tensors=_entries(share))
            for name, share, (size, digest) in zip(names, shares, map(str.split, answers), strict=True)
        ]

    def commit(self, files: Iterable[FileEntry]) -> str:
        """Rank 0 writes the manifest and gives the directory its name."""
        if self.mpi.rank != 0:
            return ""
        files = tuple(files)
        for file in files:
            if (found := (self.partial / file.name).stat().st_size) != file.bytes:
                raise CheckpointError(f"{file.name} has {found:,} bytes on the disk, but {file.bytes:,} were written")
        whole = Manifest(world_size=self.mpi.world_size, state=self.state, files=files)
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


def _gather(mpi: MPIContext, text: str) -> list[str]:
    """Every rank's text, cut at ANSWER_BYTES. Collective: every rank."""
    if mpi.world_size == 1:
        return [text]
    mine = torch.frombuffer(bytearray(text.encode()[:ANSWER_BYTES].ljust(ANSWER_BYTES, b"\0")), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(mpi.world_size)]
    dist.all_gather(texts, mine)
    return [text.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for text in texts]


def _write(path: Path, tensors: Mapping[str, torch.Tensor], beat: Beat) -> Generator[str]:
    """Write a safetensors file in parts; after each part it is on the disk. Yields, for ever after the last,
    "bytes sha256"; while it is not whole, "".

    https://github.com/huggingface/safetensors#format, written here because the library writes a file in one
    call: without a heartbeat, and hashed only by reading it again.
    """
    digest, unsynced = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _chunks(tensors):
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


def _chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, header, tensors. Copies one tensor at a time at most."""
    header: dict[str, Any] = {}
    end = 0
    for name, entry in _entries(tensors).items():
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned, so that they can be used where they are mapped
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def _entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    }


# -- loading


def newest_whole(run: RunDir, *, mpi: MPIContext, beat: Beat = lambda: None) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are passed over with a warning. Collective: every rank.

    All get the oldest of their answers: a network file system may not yet show the newest one everywhere.
    """
    found = manifest.newest_whole(run, beat=beat)
    oldest = min(_gather(mpi, found.name if found else ""), key=lambda name: (len(name), name))
    return run.checkpoints / oldest if oldest else None


def load(path: Path, *, beat: Beat = lambda: None) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """The position, and the tensors by name, on the CPU and mapped from the files, after verifying them.

    Raises CheckpointError as `verify` does. Every rank by itself, whatever the number that saved.
    """
    manifest.verify(path, beat=beat)
    whole = manifest.read_manifest(path)
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in whole.files:
            tensors |= load_file(path / file.name)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {file.name} is no safetensors file: {error}") from error
    return whole.state, tensors
