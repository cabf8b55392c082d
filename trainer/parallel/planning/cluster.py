"""The hosts and the network that a plan is made for, and how long collectives take between them.

    rank = (pipeline x data + data) x tensor + tensor      host = rank // ranks of a host
    8 hosts of 8, tensor 8 x data 8:     a tensor-parallel group is on one host, and a data group has one rank on each
    8 hosts of 8, tensor 2 x data 32:    a data group has 4 ranks on each of 8 hosts

For n ranks and B bytes, with the rate and the latency of the slowest link on the way:

    ring all-reduce             2 (n - 1) / n x B / rate + 2 (n - 1) x latency
    tree all-reduce             2 B / rate + 2 ceil(log2 n) x latency
    all-gather, reduce-scatter  (n - 1) / n x B / rate + (n - 1) x latency
    a message to one rank       B / rate + latency

Ring and costs: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
Tree: two trees that share the bytes, Sanders, Speck and Traeff, Two-Tree Algorithms for Full Bandwidth Broadcast,
Reduction and Scan, 2009, as NCCL has them since 2.4. Like NCCL, the faster of both counts.

Each rank has a network card of its own, so g ranks of a group on one host send g times as fast to the other hosts, up
to the rate of the links inside the host.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, NamedTuple

from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.run.records import Record

Collective = Literal["all-reduce", "gather or scatter", "message"]


class Cluster(Record):
    """The machines of a plan, as `onward plan --hosts` and the options beside it describe them."""

    gpu: str = ""
    """The name of a GPU; empty = the device of this machine."""
    hosts: int = 1
    ranks_per_host: int = 0
    """0 = all ranks are on one host."""
    network_bytes_per_s: float = 0.0
    """Of one rank to another host, in one direction; 0 = the usual rate of the device."""
    latency_s: float = 0.0
    """Of one message to another host; 0 = the usual one."""
    failures_every_s: float = 0.0
    """Mean time between failures of the run; 0 = not given."""
    storage_bytes_per_s: float = 0.0
    """At which all ranks together write a checkpoint; 0 = not given."""

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks; 0 = that of the configuration."""
        return self.hosts * self.ranks_per_host


PROGRESS = "planning: "
"""How lines of the log begin that say how far `auto` is."""
THIS_MACHINE = Cluster()
"""No cluster: the devices of this machine, or of the hosts of a hostfile."""


class Group(NamedTuple):
    """The ranks of one mesh axis that send to each other."""

    size: int
    hosts: int

    @property
    def per_host(self) -> int:
        """Return how many of them share a host."""
        return max(1, self.size // self.hosts)


class Links(NamedTuple):
    """How fast ranks send to each other."""

    local_bytes_per_s: float
    local_latency_s: float
    network_bytes_per_s: float
    network_latency_s: float


def cluster_in(folder: Path) -> Path:
    """Return where the process of a plan finds what it plans for."""
    return folder / "cluster.json"


def group_of(axis: str, parallel: ParallelConfig, launch: LaunchConfig, cluster: Cluster) -> Group:
    """Return the group of an axis that is on the most hosts."""
    strides = {"tensor": 1, "data": parallel.tensor, "pipeline": parallel.tensor * parallel.data}
    size: int = getattr(parallel, axis)
    stride = strides[axis]
    # what a hostfile says is not read here: tensor-parallel ranks share a host if it has enough
    ranks_per_host = cluster.ranks_per_host or (parallel.tensor if launch.hostfile else 0)
    if not ranks_per_host:
        return Group(size, 1)
    # neighbours in a group are `stride` ranks apart
    near = min(size, max(1, ranks_per_host // stride))
    hosts = math.ceil(size / near)
    # a group that does not divide a host lies on two somewhere
    if hosts == 1 and size > 1 and ranks_per_host % (stride * size):
        hosts = 2
    return Group(size, hosts)


def collective_s(what: Collective, num_bytes: float, group: Group, links: Links) -> float:
    """Return the time of one collective among the ranks of a group; num_bytes: of the whole tensor."""
    if group.size == 1:
        return 0.0
    rate, latency_s = links.local_bytes_per_s, links.local_latency_s
    if group.hosts > 1:
        rate = min(rate, group.per_host * links.network_bytes_per_s)
        latency_s = links.network_latency_s
    if what == "message":
        # one pair of ranks, and so one card
        rate = min(rate, links.network_bytes_per_s) if group.hosts > 1 else rate
        return num_bytes / rate + latency_s
    steps = group.size - 1
    once_s = steps / group.size * num_bytes / rate + steps * latency_s
    if what == "gather or scatter":
        return once_s
    tree_s = 2 * num_bytes / rate + 2 * math.ceil(math.log2(group.size)) * latency_s
    return min(2 * once_s, tree_s)
