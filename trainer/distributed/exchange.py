"""Exchange short texts and bytes between all ranks, and keep ranks in step while they read or write large files."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from onward.trainer.distributed.processes import MPIContext

TEXT_BYTES = 1024
"""Longest text of `gather`; the rest is cut off."""


def gather(mpi: MPIContext, text: str, group: ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, cut off at TEXT_BYTES. group: all ranks; None = the world. Collective: every rank."""
    # all-gather takes tensors of one size
    mine = bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
    texts = _all_gather(mpi, torch.frombuffer(mine, dtype=torch.uint8), group)
    return [text.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for text in texts]


def gather_bytes(mpi: MPIContext, content: bytes) -> list[bytes]:
    """Return every rank's bytes, of any length. Collective: every rank."""
    sizes = [int(size) for size in _all_gather(mpi, torch.tensor(len(content)))]
    # all-gather takes tensors of one size; at least one byte, because torch.frombuffer refuses an empty buffer
    mine = bytearray(content.ljust(max(1, *sizes), b"\0"))
    padded = _all_gather(mpi, torch.frombuffer(mine, dtype=torch.uint8))
    return [bytes_.numpy().tobytes()[:size] for bytes_, size in zip(padded, sizes, strict=True)]


def in_rounds(work: Iterator[str], exchange: Callable[[Callable[[], str]], list[str]]) -> list[str]:
    """Advance `work` round by round on all ranks until it is done on all; return every rank's result.

    `work` yields "" when other ranks should not wait any longer, and at last a result that is not "". `exchange`
    calls its argument on every rank and returns what all of them returned.

                  round 1    round 2    round 3
        rank 0    ""         "a"        "a"         rank 0 has a small file: it repeats its result
        rank 1    ""         ""         "b"         rank 1 has a large one

    Without the rounds rank 0 would wait in one collective until rank 1 is done, and a large file takes longer than a
    collective may.
    """
    result = ""
    results = [""]

    def advance() -> str:
        nonlocal result
        # a rank that is done repeats its result, because all ranks must take part in every exchange
        result = result or next(work)
        return result

    while "" in results:
        results = exchange(advance)
    return results


def _all_gather(mpi: MPIContext, mine: Tensor, group: ProcessGroup | None = None) -> list[Tensor]:
    if mpi.world_size == 1:
        return [mine]
    found = [torch.empty_like(mine) for _ in range(mpi.world_size)]
    dist.all_gather(found, mine, group=group)
    return found
