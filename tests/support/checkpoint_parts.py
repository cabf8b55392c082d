"""What each rank of a small job gives to a checkpoint."""

from __future__ import annotations

import torch

from onward.trainer.checkpoint.write_plan import TensorPart
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.distributed.weights import Placement, share


def held(tensors: dict[str, torch.Tensor], mpi: MPIContext) -> dict[str, TensorPart]:
    """A rank's parts: of every second tensor its stretch, of the others all."""
    parts = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        start, stop = share(len(tensor), mpi.rank, mpi.world_size) if number % 2 else (0, len(tensor))
        parts[name] = (tensor[start:stop], Placement.full(tensor.shape).narrow(0, start, stop))
    return parts
