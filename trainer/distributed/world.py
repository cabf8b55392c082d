"""World: which ranks there are and where they run, however they were started, and the network between them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from onward.trainer.errors import RuntimeUnavailable


class Place(NamedTuple):
    """Where a rank runs, and which GPUs it sees."""

    local_rank: int
    """Its number among the ranks of its host, which can share memory."""
    local_size: int
    host: int
    """The first rank of its host."""
    num_gpus: int = 0
    """GPUs that the process sees: all of the host, or those that a launcher such as Slurm has given to it."""
    visible: int = 0
    """A checksum of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class World:
    """What a rank learns when it joins the job."""

    rank: int
    places: tuple[Place, ...]
    """Of all ranks."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    @property
    def place(self) -> Place:
        """The place of this rank."""
        return self.places[self.rank]


def own_address_towards(host: str) -> str:
    """Return this host's IPv4 address on the route to another host. Sends no packet.

    The address of the host's own name would not do: many machines resolve it to 127.0.1.1.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise RuntimeUnavailable(f"{socket.gethostname()} has no route to {host}: {error}") from error
        return str(probe.getsockname()[0])


def use_interface_of(address: str) -> None:
    """Bind gloo and NCCL to the interface of an address of this host, unless the user has chosen one.

    A docker bridge has the same address on all hosts.
    """
    interface = "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            interface = name
            break
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def address_in_use() -> str:
    """Return this host's address on the interface that gloo is bound to; "" if it has no IPv4 address."""
    entries = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    return next((entry.address for entry in entries if entry.family == socket.AF_INET), "")
