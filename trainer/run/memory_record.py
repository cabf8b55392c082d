"""MemorySnapshot: what was in the memory of a rank when it ran out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from onward.trainer.run.directory import RunDir

Kind = Literal["weight", "gradient", "optimizer state", "activation", "other"]


class LiveTensor(BaseModel):
    """Memory that one or several tensors share."""

    kind: Kind
    name: str
    """Initializer, ONNX tensor, or the autograd function that keeps it for the backward pass; "" if it is not known."""
    more_names: int = 0
    """How many other tensors share the memory: the gradients of several weights are views of one bucket."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int


class MemorySnapshot(BaseModel):
    """The memory of one rank at an out-of-memory error."""

    rank: int
    host: str
    attempt: int
    step: int
    error: str
    rss_bytes: int
    """Memory of the process that is in RAM."""
    available_bytes: int
    """Memory that the host could still give without swapping."""
    address_space_limit_bytes: int = -1
    """RLIMIT_AS; -1 = none."""
    device: dict[str, int] = {}
    """Of the GPU: bytes in use by tensors, reserved by torch, free and in all."""
    bytes_by_kind: dict[Kind, int]
    """Of all live tensors that were found, also of those that are not listed."""
    num_tensors: int
    tensors: tuple[LiveTensor, ...]
    """The largest ones, the largest first."""
    allocations: str = ""
    """The file beside this one with torch's record of the allocations, for pytorch.org/memory_viz; "" without one."""


def snapshot_path(run: RunDir, attempt: int, rank: int) -> Path:
    """Return the path of the snapshot of a rank."""
    return run.memory / f"{attempt:03d}-rank-{rank:05d}.json"
