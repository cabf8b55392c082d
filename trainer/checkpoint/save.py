"""Save a checkpoint: every rank writes one file, rank 0 the manifest, and a rename makes it valid.

    all ranks    make the write plan (write_plan.py)
    rank 0       mkdir step-000000100.partial-002; so does each host with a home of its own
    all ranks    write rank-0000N.safetensors, fsync
    rank 0       gets the files of those hosts over the network
    rank 0       write manifest.json, fsync, rename to step-000000100, fsync the directory

A crash before the rename leaves a partial directory, which the next attempt deletes. After each line all ranks
exchange the outcome; an error on one rank is raised by all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from onward.trainer.checkpoint import retention
from onward.trainer.checkpoint.load import verify_together
from onward.trainer.checkpoint.manifest import Beat, FileEntry, Manifest, serialise
from onward.trainer.checkpoint.rank_file import RankFile
from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.checkpoint.write_plan import TensorPart, WritePlan, make_write_plan
from onward.trainer.distributed.exchange import gather, in_rounds
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import CheckpointError, Fenced, OnwardError, StorageUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import fsync, sync
from onward.trainer.run.outcomes.storage import storage_error
from onward.trainer.run.records import RunIdentity, read_record

MOVED_BYTES = 32 << 20
"""Of a file that comes to rank 0, in one part: between two parts the ranks show that they live."""
_ERRORS = {kind.__name__: kind for kind in (Fenced, StorageUnavailable)}
"""Beside CheckpointError: what one rank raises, all do."""


def save(
    run: RunDir,
    *,
    attempt: int,
    state: TrainState,
    parts: Mapping[str, TensorPart],
    mpi: MPIContext,
    beat: Beat = lambda: None,
) -> Path:
    """Write a checkpoint; when this returns, it is on the disk and survives a power cut. Collective: every rank.

    parts: checkpoint key -> what this rank holds. Ranks may hold equal or disjoint pieces, which together tile every
    tensor. Each piece is written once. A complete checkpoint of the same step is left as it is. Raises, with the same
    text on every rank and leaving earlier checkpoints as they are, StorageUnavailable when the disk is full or fails,
    CheckpointError when the parts do not tile the tensors, Fenced when the run directory belongs to a newer attempt.
    """
    plan = make_write_plan(parts, mpi)
    file = RankFile(plan.by_rank[mpi.rank])
    content = file.read(parts)
    return write(run, attempt=attempt, state=state, plan=plan, file=file, content=content, mpi=mpi, beat=beat)


def write(
    run: RunDir,
    *,
    attempt: int,
    state: TrainState,
    plan: WritePlan,
    file: RankFile,
    content: Iterable[memoryview],
    mpi: MPIContext,
    beat: Beat,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint as `save` does, with the bytes of this rank's file from `content`.

    group: all ranks, with a host backend; None = the world. Collective: every rank of it, in one thread of each.
    """
    saving = _Saving(run, attempt, state, plan, file, content, mpi, beat, group)
    try:
        # rank 0 alone looks, and all learn it: a network file system may show others something else
        if "exists" in saving.together(saving.look_for_existing) and saving.is_complete():
            return saving.final
        homes = saving.together(saving.make_directory)
        results = saving.write_files()
        saving.bring_files(homes, results)
        saving.together(lambda: saving.commit(results))
    # every rank raises the same error, and one of them removes what all have written
    except OnwardError:
        if mpi.rank == 0 or run.own_home.exists():
            shutil.rmtree(saving.partial, ignore_errors=True)
        raise
    return saving.final


@dataclass(frozen=True)
class _Saving:
    """One call of `write` on one rank."""

    run: RunDir
    attempt: int
    state: TrainState
    plan: WritePlan
    file: RankFile
    content: Iterable[memoryview]
    mpi: MPIContext
    beat: Beat
    group: ProcessGroup | None

    @property
    def final(self) -> Path:
        return self.run.checkpoint(self.state.step)

    @property
    def partial(self) -> Path:
        return self.final.with_name(f"{self.final.name}.partial-{self.attempt:03d}")

    def together(self, action: Callable[[], str]) -> list[str]:
        """Run an action and return what it returned on every rank. If it raised on one, all ranks raise its error."""
        try:
            answer = f"ok {self._with_explained_errors(action)}"
        # the error travels as its class and sentence: the others raise the same
        except OnwardError as error:
            answer = f"{type(error).__name__} {error}"
        # every rank reaches this line, whatever its action did: otherwise the others would wait
        answers = [answer.partition(" ") for answer in gather(self.mpi, answer, self.group)]
        for kind, _, sentence in answers:
            if kind != "ok":
                raise _ERRORS.get(kind, CheckpointError)(sentence)
        return [sentence for _, _, sentence in answers]

    def _with_explained_errors(self, action: Callable[[], str]) -> str:
        """Run an action; raise an error of the operating system as one that says what to do."""
        try:
            return action()
        except OSError as error:
            self.run.check_fence(self.attempt)  # a newer attempt deletes what this one writes, which is then Fenced
            storage = storage_error(error, self.partial, needed=self.plan.num_bytes)
            what = str(storage or f"{error.strerror}: {error.filename or self.partial}; check the disk, then resume")
            # all ranks raise this, and the path is the same on every host
            where = f" on {socket.gethostname()}" if self.run.own_home.exists() else ""
            raise (StorageUnavailable if storage else CheckpointError)(
                f"step {self.state.step} could not be saved{where}: {what}; earlier checkpoints are unchanged"
            ) from error

    def look_for_existing(self) -> str:
        """Return "exists" on rank 0 if there is a checkpoint of this step, complete or damaged."""
        if self.mpi.rank != 0:
            return ""
        self.run.check_fence(self.attempt)
        return "exists" if self.final.exists() else ""

    def is_complete(self) -> bool:
        """Return whether the existing checkpoint of this step verifies. Collective: every rank."""
        try:
            verify_together(self.final, mpi=self.mpi, beat=self.beat, group=self.group)
        except CheckpointError:
            return False
        return True

    def make_directory(self) -> str:
        """Make the partial directory, on rank 0 and on hosts with a home of their own; return "own" on these."""
        if self.run.own_home.exists():
            self.partial.mkdir(parents=True, exist_ok=True)  # also another rank of the host makes it
            return "own"
        if self.mpi.rank != 0:
            return ""
        self.run.checkpoints.mkdir(exist_ok=True)
        fsync(self.run.root)
        retention.sweep(self.run, attempt=self.attempt)
        # before anything is written; if the disk fills up later, the writing ranks report it
        if shutil.disk_usage(self.run.checkpoints).free < self.plan.num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run.checkpoints))
        self.partial.mkdir()
        return ""

    def write_files(self) -> list[str]:
        """Write this rank's file, in rounds with the other ranks; return of every rank's what `RankFile.write` does."""
        path = self.partial / _file_name(self.mpi.rank)
        with contextlib.closing(self.file.write(path, self.content, self.beat)) as writing:
            return in_rounds(writing, self.together)

    def bring_files(self, homes: Sequence[str], results: Sequence[str]) -> None:
        """Move the files of hosts with a home of their own to that of rank 0. Collective: every rank.

        homes: of each rank, as `make_directory` returns it. results: as of `write_files`.
        """
        for rank, (home, result) in enumerate(zip(homes, results, strict=True)):
            if home:
                with contextlib.closing(self._moved(rank, int(result.split()[0]))) as moving:
                    in_rounds(moving, self.together)

    def _moved(self, rank: int, size: int) -> Generator[str]:
        """Move the file of a rank, `size` bytes. Yield "" before each part, and at last "moved".

        What a disk refuses is raised before such a yield, so that all ranks learn it and none waits for the other.
        """
        path = self.partial / _file_name(rank)
        if self.mpi.rank == 0:
            with path.open("xb") as target:
                for part in _parts(size):
                    yield ""
                    dist.recv(part, rank, group=self.group)
                    target.write(part.numpy().data)
                    self.beat()
                sync(target)
        elif self.mpi.rank == rank:
            with path.open("rb") as source:
                for part in _parts(size):
                    if source.readinto(part.numpy().data) != len(part):
                        raise OSError(errno.EIO, "the file is shorter than it was written", str(path))
                    yield ""
                    dist.send(part, 0, group=self.group)
            path.unlink()
            # the last one of a host finds it empty
            with contextlib.suppress(OSError):
                self.partial.rmdir()
        yield "moved"

    def commit(self, results: Sequence[str]) -> str:
        """Write the manifest and rename the directory, on rank 0."""
        if self.mpi.rank != 0:
            return ""
        by_rank = zip(self.plan.by_rank, map(str.split, results), strict=True)
        files = tuple(
            FileEntry(name=_file_name(rank), bytes=int(size), sha256=digest, tensors={p.key: p.entry for p in pieces})
            for rank, (pieces, (size, digest)) in enumerate(by_rank)
        )
        for file in files:
            # a network file system may not show this rank what another one has written
            if (found := (self.partial / file.name).stat().st_size) != file.bytes:
                raise CheckpointError(f"{file.name} has {found:,} bytes on the disk, but {file.bytes:,} were written")
        manifest = Manifest(
            world_size=self.mpi.world_size,
            state=self.state,
            tensors=self.plan.tensors,
            files=files,
            model_sha256=model_of(self.run),
        )
        path = self.partial / "manifest.json"
        # the last file: a directory without it is not a checkpoint
        path.write_bytes(serialise(manifest))
        fsync(path)
        fsync(self.partial)
        # as late as possible: writing takes long enough for a newer attempt to have begun
        self.run.check_fence(self.attempt)
        # `is_complete` has found it damaged; a rename onto a directory with files fails
        if self.final.exists():
            retention.set_aside(self.final)
        self.partial.rename(self.final)
        fsync(self.run.checkpoints)
        return ""


def _parts(size: int) -> Iterator[torch.Tensor]:
    """Yield room for each part of a file of `size` bytes."""
    for start in range(0, size, MOVED_BYTES):
        yield torch.empty(min(MOVED_BYTES, size - start), dtype=torch.uint8)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def model_of(run: RunDir) -> str:
    """Return the digest of the ONNX file that a run began with; "" if no record has it."""
    return read_record(run.identity, RunIdentity).model_sha256 if run.identity.exists() else ""
