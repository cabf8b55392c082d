"""Join the world by environment variables, as torchrun, Kubeflow's TrainJob and plain srun start ranks: no MPI.

    launcher --> RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT of each process (of Slurm its own variables)
             --> a TCPStore at that address: torchrun's agent has it open, else rank 0 opens it
             --> each rank writes where it runs into the store, and reads it of all others

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables, https://slurm.schedmd.com/srun.html
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from onward.trainer.distributed.world import Place, World, own_address_towards, use_interface_of
from onward.trainer.errors import RuntimeUnavailable

JOIN_TIMEOUT_S = 300.0
"""Longest wait for the other ranks: a scheduler may start them one after the other."""
SLURM_PORTS = range(20_000, 32_000)
"""Where jobs of Slurm meet if MASTER_PORT is not set: below the ports that the kernel gives to outgoing connections."""


class EnvironmentWorld:
    """The world of one process that was started with these variables."""

    def __init__(self) -> None:
        self._rank = _number("RANK", "SLURM_PROCID")
        self._size = _number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
        self._address = ""
        self._port = 0
        self._store: Store | None = None
        self._hosts: list[str] = []
        """The name of the host of each rank."""

    def join(self, *, expected_world_size: int, num_gpus: int, visible: int) -> World:
        """Join the job. Collective: the first call of every rank. num_gpus, visible: as of `Place`.

        Raises RuntimeUnavailable when the world has another size, or the ranks do not find each other.
        """
        if self._size != expected_world_size:
            raise RuntimeUnavailable(
                f"the job needs {expected_world_size} ranks, but the launcher has started {self._size}; start it with "
                f"`torchrun --nproc-per-node {expected_world_size}`, or change launch.num_ranks and [parallel]"
            )
        self._address = os.environ.get("MASTER_ADDR") or _first_host_of_slurm()
        self._port = int(os.environ.get("MASTER_PORT") or _port_of_slurm())
        self._store = store = self._opened(datetime.timedelta(seconds=JOIN_TIMEOUT_S))
        # a boot id tells hosts of one name apart, the network namespace containers on one kernel
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        host = [socket.gethostname(), boot, Path("/proc/self/ns/net").stat().st_ino]
        store.set(f"place-{self._rank}", json.dumps([host, num_gpus, visible]))
        told = [json.loads(store.get(f"place-{rank}")) for rank in range(self._size)]
        hosts = [place[0] for place in told]
        self._hosts = [name for name, *_ in hosts]
        places = [
            Place(hosts[:rank].count(host), hosts.count(host), hosts.index(host), gpus, seen)
            for rank, (host, gpus, seen) in enumerate(told)
        ]
        return World(self._rank, tuple(places))

    def open_store(self, timeout: datetime.timedelta, *, single_host: bool) -> Store:
        """Return the store that connects all ranks. Call after `join`."""
        assert self._store is not None
        self._store.set_timeout(timeout)
        if single_host:
            use_interface_of(socket.gethostbyname(self._address))
            return self._store
        # towards another host: many machines resolve their own name to 127.0.1.1
        own = self._hosts[self._rank]
        others = [host for host in self._hosts if host != own]
        use_interface_of(own_address_towards(others[0] if others else self._address))
        return self._store

    def leave(self) -> None:
        """Leave the job: the launcher sees that the process ends."""

    def versions(self) -> dict[str, str]:
        """Return nothing: no library but torch starts these ranks."""
        return {}

    def _opened(self, timeout: datetime.timedelta) -> Store:
        # torchrun's agent keeps the store of its job, also over restarts, which must not read what the last start wrote
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        prefix = f"onward-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        is_master = self._rank == 0 and not of_agent
        listening: int | None = None
        if is_master:
            # by itself TCPStore listens on all interfaces, whatever its address
            try:
                listening = socket.create_server((self._address, self._port)).detach()
            except OSError as error:
                raise RuntimeUnavailable(
                    f"rank 0 cannot listen at {self._address}:{self._port} ({error}); set MASTER_ADDR to the host of "
                    "rank 0 and MASTER_PORT to a free port"
                ) from error
        try:
            store = TCPStore(
                self._address,
                self._port,
                self._size,
                is_master=is_master,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listening,
            )
        except RuntimeError as error:  # torch has no narrower class
            raise RuntimeUnavailable(
                f"rank {self._rank} finds no store at {self._address}:{self._port} (MASTER_ADDR, MASTER_PORT): "
                f"{str(error).splitlines()[0]}"
            ) from error
        return PrefixStore(prefix, store)


def is_given() -> bool:
    """Return whether a launcher without MPI has started this process: torchrun and its like, or srun without PMI."""
    by_mpi = any(name in os.environ for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    by_name = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    # of a step, which srun has started: the script of a job has SLURM_PROCID and SLURM_NTASKS, too, and is one process
    by_slurm = "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    return not by_mpi and (by_name or by_slurm)


def _number(*names: str) -> int:
    return next(int(os.environ[name]) for name in names if name in os.environ)


def _first_host_of_slurm() -> str:
    """Return the host of rank 0: the first of the allocation, whose list such as n[1-3] Slurm itself spells out."""
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    command = ["scontrol", "show", "hostnames", hosts]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise RuntimeUnavailable(f"{' '.join(command)} names no host ({error}); set MASTER_ADDR") from error


def _port_of_slurm() -> int:
    """Return a port that all ranks of a step know, and other steps on the host hardly have."""
    number = 97 * int(os.environ.get("SLURM_JOB_ID") or 0) + int(os.environ.get("SLURM_STEP_ID") or 0)
    return SLURM_PORTS[number % len(SLURM_PORTS)]
