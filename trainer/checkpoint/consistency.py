"""Check that ranks which hold the same part of a tensor hold the same bits of it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from onward.trainer.checkpoint.manifest import Beat
from onward.trainer.checkpoint.write_plan import TensorPart, make_write_plan, shown
from onward.trainer.distributed.exchange import gather_bytes
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import NUM_NAMED
from onward.trainer.errors import ReplicasDiffer

WORDS = 1 << 18
"""Words of 4 bytes that are summed at once; temporary tensors take twice as much memory."""


def check_copies(parts: Mapping[str, TensorPart], mpi: MPIContext, *, step: int = 0, beat: Beat = lambda: None) -> None:
    """Raise unless all ranks that hold a piece hold the same bits of it. Collective: every rank.

    step: the one after which it is called, for the message.

    Compares a checksum of each such piece. Raises, with the same text on every rank, ReplicasDiffer when copies differ
    and CheckpointError when the parts do not tile the tensors.
    """
    plan = make_write_plan(parts, mpi)
    # a piece on one rank has no copy to differ from
    copied = [piece for piece in plan.pieces if len(piece.ranks) > 1]
    sums = []
    for piece in copied:
        if mpi.rank in piece.ranks:
            sums.append(_checksum(piece.content(parts)))
            beat()
    flat = torch.stack(sums).cpu() if sums else torch.empty(0, dtype=torch.int64)
    # each rank's checksums are in the order of `copied`, without the pieces it does not hold
    found = [iter(memoryview(numbers).cast("q")) for numbers in gather_bytes(mpi, flat.numpy().tobytes())]
    different: dict[str, str] = {}
    for piece in copied:
        groups: dict[int, list[int]] = defaultdict(list)
        # the iterators advance in step with `copied`, as the checksums were made
        for rank in piece.ranks:
            groups[next(found[rank])].append(rank)
        if len(groups) > 1:
            # the smallest group is probably the one that is wrong, and is named first
            fewest_first = sorted(groups.values(), key=len)
            different.setdefault(piece.name, f"{piece.key} on {' is not that on '.join(map(shown, fewest_first))}")
    if different:
        raise ReplicasDiffer(
            f"after step {step}: {len(different)} of {len(plan.tensors)} tensors differ between ranks that must hold "
            "the same bits: "
            f"{'; '.join(list(different.values())[:NUM_NAMED])}; the newest checkpoint was saved before they differed, "
            "so resume from it; if it happens again, test the memory of these hosts"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """Return a sum of the 4-byte words, each multiplied by its position, so that swapped words change it."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    if odd := -len(content) % 4:
        content = torch.nn.functional.pad(content, (0, odd))
    # torch views bytes as 32-bit words only at a multiple of 4 bytes
    elif content.storage_offset() % 4:
        content = content.clone()
    positions = _positions(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for words in torch.split(content.view(torch.int32), WORDS):
        # positions repeat in each chunk, so the factor makes the order of the chunks count
        total = total * 1_000_003 + (words * positions[: len(words)]).sum()  # modulo 2^64
    return total


@functools.lru_cache(maxsize=1)
def _positions(device: torch.device) -> Tensor:
    return torch.arange(1, WORDS + 1, device=device)
