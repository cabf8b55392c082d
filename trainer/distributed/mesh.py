"""Arrange the ranks in a mesh, and make process groups.

    data 2 x tensor 2 x pipeline 2 = 8 ranks; neighbours in rank are neighbours on the tensor axis

                       pipeline 0               pipeline 1
                    tensor 0  tensor 1       tensor 0  tensor 1
        data 0       rank 0    rank 1         rank 4    rank 5
        data 1       rank 2    rank 3         rank 6    rank 7

Tensor-parallel ranks send most, so they are on one host if a host has enough ranks; pipeline stages send least.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from onward.trainer.config.sections.ranks import ParallelConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.errors import RuntimeUnavailable

AXES = ("pipeline", "data", "tensor")
"""The axes of the mesh, outermost first: neighbours in rank are neighbours in `tensor`."""


@dataclass(frozen=True)
class ParallelDims:
    """How the ranks divide the work: one size for each axis of the mesh."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard: int = 0
    """Neighbouring replicas that divide weights or states among them; 0 = all."""

    @staticmethod
    def of(config: ParallelConfig) -> ParallelDims:
        """Return the sizes of a configuration."""
        return ParallelDims(config.data, config.tensor, config.pipeline, config.shard)

    @property
    def world_size(self) -> int:
        """Return the number of ranks: the product of the sizes."""
        return self.data * self.tensor * self.pipeline

    def check(self, world_size: int) -> None:
        """Raise RuntimeUnavailable, with all four numbers, unless the sizes multiply to the world size."""
        if self.world_size != world_size:
            raise RuntimeUnavailable(
                f"data {self.data} x tensor {self.tensor} x pipeline {self.pipeline} needs "
                f"{self.world_size} ranks, but {world_size} were started; change [parallel] or launch.num_ranks"
            )

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of a rank in the mesh; `tensor` varies fastest, so that its ranks share a host."""
        # the inverse of rank = (pipeline · data + d) · tensor + t
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return Coordinate(pipeline, data, tensor)


class Coordinate(NamedTuple):
    """A rank's place in the mesh."""

    pipeline: int
    data: int
    tensor: int


def make_mesh(mpi: MPIContext, dims: ParallelDims, *, timeout_s: float) -> DeviceMesh:
    """Arrange the ranks as a grid with the axes `AXES`: `mesh.get_group("pipeline" | "data" | "tensor")`.

    The data axis is one of (replicate, shard) as well: `shard` is the neighbouring replicas that divide weights or
    states, `replicate` those that hold the same share. Collective: every rank.
    """
    dims.check(mpi.world_size)
    shard = dims.shard or dims.data
    # outermost first, as in `coordinate`
    shape = (dims.pipeline, dims.data // shard, shard, dims.tensor)
    mesh = init_device_mesh(mpi.device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    # the reducer needs all replicas as one group, FSDP the two axes
    replicas = mesh["replicate", "shard"]._flatten("data")
    timeout = datetime.timedelta(seconds=timeout_s)
    # the groups of an axis do not inherit the world's time-out: theirs is 30 minutes
    for group in (*mesh.get_all_groups(), replicas.get_group()):
        _set_pg_timeout(timeout, group)
    return mesh


def new_group(ranks: Sequence[int], *, timeout_s: float) -> ProcessGroup | None:
    """Make a further group of these ranks; return None on the others.

    torch numbers the ranks of a group in ascending order, in whatever order they are given (the argument `sort_ranks`
    exists from torch 2.12 on only). Collective: every rank of the world, in the same order.
    """
    group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
    return group if dist.get_rank() in ranks else None


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend with which the group sends tensors of the device: "gloo" or "nccl"."""
    return str(group._get_backend(device).name())


def message_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Return where tensors of `device` must be to be sent from rank to rank: the device itself, or the host with gloo.

    gloo copies GPU tensors through host memory in its collectives, but not in send and receive.
    """
    return torch.device("cpu") if backend_of(group, device) == "gloo" else device
