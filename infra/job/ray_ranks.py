"""Start the ranks of a job on a Ray cluster, pass signals on to them, print their output, and leave nothing of it.

    python -m onward.infra.job.ray_ranks --ranks 2 -- python -m onward.trainer train RUN_DIR

    this program, a driver of Ray --- actor --- rank 0       start, signal, look: calls of the actor
                                  +-- actor --- rank 1

The placement group and the actors belong to this driver: Ray removes them also when it is killed. The kernel ends a
rank with its actor. The first rank that fails ends the others.

Exit status: that of the first rank that failed, 128 + the number of a signal, 75 if all saved, 0.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from onward.infra.job import child_program
from onward.infra.job.launcher import CARRIED

PORTS = range(20_000, 32_000)
"""Where ranks meet: above the ports of Ray's workers, below those that the kernel gives to outgoing connections."""
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "OMP_NUM_THREADS")
"""Prefixes of the variables of a node that its ranks do not get: by those of an srun that has started Ray they would
look for their world, and Ray gives each actor one thread."""
POLL_S = 0.2
SILENT_S = 1.0
"""Longest wait for the answers of actors: one that does not answer must not delay what is sent to the others."""
END_S = 1.0
"""Time between SIGTERM, at which ranks write their stacks, and SIGKILL."""
CONNECT_S = 5.0
"""Longest time in which a cluster must accept a connection."""
LOST_S = 60.0
"""Longest time in which Ray notices that a node is gone; it asks each one every few seconds."""
SAY_S = 10.0
"""Seconds between two lines about the wait for the cluster."""
STOPPED = 75
"""Exit status of a rank that has saved as asked."""


class Place(NamedTuple):
    """Where an actor runs."""

    address: str
    host: str
    node: str
    """Ray's id of the node."""
    port: int
    """A free one."""


class Look(NamedTuple):
    """What an actor says about its rank."""

    output: bytes
    """Since the look before."""
    status: int | None
    """Exit status as `subprocess` has it; None while it runs."""


class RankActor:
    """A process of Ray on a node: starts one rank there as its child process.

    Ray sends this class to the node by value, so it uses nothing of this package.
    """

    def place(self, ports: Sequence[int]) -> Place:
        """Return where this is, with the first of the ports that is free."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        for port in ports:
            with socket.socket() as tried:
                # as rank 0 will: a port of a connection that was closed just now is free
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    tried.bind((address, port))
                except OSError:
                    continue
            # the socket is closed again: of all these ports only one is used, by rank 0
            return Place(address, socket.gethostname(), ray.get_runtime_context().get_node_id(), port)
        raise OSError(f"none of {len(ports)} ports is free at {address}")

    def start(self, client: str, words: Sequence[str], folder: str, foreign: tuple[str, ...], variables: Any) -> None:
        """Start the rank in a folder. client: the path of child_program.py. variables: of its environment."""
        # what Ray has set for the actor stays, such as CUDA_VISIBLE_DEVICES with its share of the GPUs
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        # a file, not a pipe: a driver that is slow or suspended must not stop the rank
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this process)
        self.num_read = 0
        self.child = subprocess.Popen(
            # the kernel kills the rank when this process ends
            [words[0], "-I", "-S", client, str(int(signal.SIGKILL)), str(os.getpid()), "", *words],
            env={**kept, **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            # one stream, so that an error stays behind the lines that came before it
            stderr=subprocess.STDOUT,
        )

    def send(self, number: int) -> None:
        """Send a signal to the rank."""
        self.child.send_signal(number)

    def look(self) -> Look:
        """Return what the rank has printed since the last look, and its exit status."""
        status = self.child.poll()  # before the output, which is complete then
        # pread does not move the position in the file, which the rank shares and writes at
        output = os.pread(self.output.fileno(), 1 << 24, self.num_read)
        self.num_read += len(output)
        return Look(output, status)


# -- the cluster


class Needs(NamedTuple):
    """What the ranks ask of the cluster."""

    ranks: int
    cpus: int
    """Of each rank."""
    gpus: float
    """Of each rank; below 1 where several share one."""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one rank, as Ray names them."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.gpus else {"CPU": self.cpus}

    def missing(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Return that these nodes are too few for the ranks, with the numbers; "" if they are enough."""
        room = 0
        for node in nodes:
            # the scarcest resource decides; what is left over on two nodes does not add up to a rank
            room += min(int(node["Resources"].get(name, 0.0) / needed) for name, needed in self.bundle.items())
        if room >= self.ranks:
            return ""
        having = []
        for node in nodes:
            cpus, gpus = (node["Resources"].get(name, 0.0) for name in ("CPU", "GPU"))
            having.append(f"{node['NodeManagerHostname']} with {cpus:g} CPUs and {gpus:g} GPUs")
        each = " and ".join(f"{number:g} {name}" for name, number in self.bundle.items())
        return (
            f"the Ray cluster has room for {room} rank{'s' * (room != 1)}, but the job needs {self.ranks}, each with "
            f"{each}; its nodes are {', '.join(having) or 'none'}; add nodes by `ray start --address=HOST:PORT`, start "
            "fewer ranks, or change launch.device, launch.threads_per_rank or launch.ranks_per_gpu"
        )


def living_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def needs_of(arguments: argparse.Namespace, nodes: Sequence[Mapping[str, Any]]) -> Needs:
    """Return what the ranks ask for; with device "auto" GPUs, if any node has one."""
    has_gpus = any(node["Resources"].get("GPU") for node in nodes)
    on_gpus = arguments.device == "cuda" or (arguments.device == "auto" and has_gpus)
    # Ray counts in ten-thousandths, and three times a rounded-up third would be more than one GPU
    part = math.floor(1e4 / arguments.ranks_per_gpu) / 1e4
    return Needs(arguments.ranks, arguments.cpus, part if on_gpus else 0.0)


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, else to that of this host. Exits with what to do if there is none."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    to_do = (
        "start a node here by `ray start --head`, or by `ray start --address=HOST:PORT` as a part of another one's "
        "cluster, and set RAY_ADDRESS if it is not the only cluster of this host"
    )
    if not re.fullmatch(r"auto|[^/]+:\d+", address):
        sys.exit(f"RAY_ADDRESS is {address!r}, and must be HOST:PORT: the flow runs on a node of the cluster; {to_do}")
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            # Ray itself tries for more than five minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        # the output of ranks is read from their actors
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        sys.exit(f"no Ray cluster at {address!r} ({' '.join(str(error).split())}); {to_do}")


@contextmanager
def bundles_of(needs: Needs, signals: Signals) -> Iterator[PlacementGroup]:
    """Reserve the resources of all ranks, at once or not at all, and give them back; wait for them until a signal."""
    # on few nodes, because ranks of one node send tensors to each other without the network
    group = placement_group([needs.bundle] * needs.ranks, strategy="PACK")
    try:
        said_at = time.monotonic()
        while not group.wait(POLL_S):
            # no rank has begun that could save, so each signal ends the wait
            for number in signals.take():
                sys.exit(128 + number)
            if time.monotonic() - said_at >= SAY_S:
                print(f"ray: waiting; {needs.missing(living_nodes()) or 'other jobs use its resources'}", flush=True)
                said_at = time.monotonic()
        yield group
    finally:
        remove_placement_group(group)


# -- the job


@dataclass
class Signals:
    """Signals that this program has got and not yet passed on."""

    received: list[int] = field(default_factory=list)

    def install(self) -> None:
        """Take note of signals from now on, also those that Ray has a handler of."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def take(self) -> list[int]:
        """Return what has come since the last call."""
        # a handler may add a signal between these lines, so only what was copied is removed
        taken = self.received[:]
        del self.received[: len(taken)]
        return taken


class RunningRank:
    """A rank, as this program sees it."""

    def __init__(self, rank: int, actor: Any, place: Place, starting: Any) -> None:
        """starting: the call that starts it."""
        self.rank = rank
        self.actor = actor
        self.place = place
        self.status: int | None = None
        """Its exit status, once it has ended."""
        self.looking = starting
        """The newest call whose result was not read."""

    def send(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.status is None:
            # nobody waits for the answer: the next look notices that an actor is gone
            self.actor.send.remote(number)

    def answer(self) -> str:
        """Print its new output; return how it ended if it has just done so, else ""."""
        try:
            look = self._look()
        except ray.exceptions.RayTaskError as error:
            self.status = 1
            return (
                f"ray: rank {self.rank} on {self.place.host} could not be started: {error.cause}; every node needs the "
                "same environment and Onward's home under the same paths"
            )
        except ray.exceptions.RayError as error:
            # the actor has ended, and with it the rank
            self.status = -signal.SIGKILL
            return self._without_actor(error)
        # bytes as they came: a look may end in the middle of a letter
        sys.stdout.buffer.write(look.output)
        sys.stdout.flush()
        self.status = look.status
        if look.status is None:
            self.looking = self.actor.look.remote()
            return ""
        how = f"exited with status {look.status}" if look.status >= 0 else f"was ended by signal {-look.status}"
        return f"ray: rank {self.rank} on {self.place.host} {how}"

    def _look(self) -> Look:
        """Return the newest look. Raises RayError when the actor has ended, and Ray knows whether its node has, too."""
        deadline = time.monotonic() + LOST_S
        while True:
            try:
                # the first call is `start`, which returns None, and its rank runs
                return ray.get(self.looking) or Look(b"", None)
            except ray.exceptions.ActorUnavailableError:
                # its connection is closed: first of all that a lost node causes, and Ray finds out about that
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
                self.looking = self.actor.look.remote()

    def _without_actor(self, error: Exception) -> str:
        said = " ".join(str(error).split())
        if self.place.node in {node["NodeID"] for node in living_nodes()} and "node has died" not in said:
            return f"ray: rank {self.rank} on {self.place.host} was ended by signal 9, with its actor: {said}"
        return f"ray: rank {self.rank} lost its node {self.place.host}: {said}"


def start_ranks(group: PlacementGroup, words: Sequence[str]) -> list[RunningRank]:
    """Start an actor in each bundle, and a rank below each; the ranks of a node follow each other."""
    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(group.bundle_count)]
    remote = ray.remote(RankActor)
    actors = list[Any]()
    for bundle, strategy in zip(group.bundle_specs, strategies, strict=True):
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        actors.append(remote.options(**options, scheduling_strategy=strategy).remote())
    # Ray keeps 10002 to 19999 for itself; two jobs at once hardly choose alike
    ports = random.Random().sample(PORTS, 50)
    places: list[Place] = ray.get([actor.place.remote(ports) for actor in actors])
    # a tensor-parallel group has neighbours by rank, which should share a node
    order = sorted(range(len(actors)), key=lambda index: places[index].node)
    addresses = {place.address for place in places}
    first = places[order[0]]
    # no other variable leaves this host, as under mpirun: an environment may hold keys
    carried = {name: value for name, value in os.environ.items() if name.startswith(CARRIED)}
    # nobody outside needs to reach the store of ranks that share a host
    address = first.address if len(addresses) > 1 else "127.0.0.1"
    meeting = {"WORLD_SIZE": str(len(actors)), "MASTER_ADDR": address, "MASTER_PORT": str(first.port)}
    ranks: list[RunningRank] = []
    for rank, index in enumerate(order):
        place = places[index]
        own = {"RANK": str(rank), "LOCAL_RANK": str(sum(other.place.node == place.node for other in ranks))}
        variables = carried | meeting | own
        starting = actors[index].start.remote(child_program.__file__, words, str(Path.cwd()), FOREIGN, variables)
        ranks.append(RunningRank(rank, actors[index], place, starting))
    return ranks


def watch(ranks: Sequence[RunningRank], signals: Signals) -> int:
    """Pass signals on and print output until all ranks have ended; return the exit status of this program."""
    first_failure: int | None = None
    kill_at = float("inf")
    while running := [rank for rank in ranks if rank.status is None]:
        for number in signals.take():
            if number != signal.SIGUSR1 and first_failure is None:
                print(f"ray: asked to end by {signal.Signals(number).name}", flush=True)
                first_failure = -number
            for rank in running:
                rank.send(number if number == signal.SIGUSR1 else signal.SIGTERM)
        looks = {rank.looking: rank for rank in running}
        answered, _ = ray.wait([*looks], num_returns=len(looks), timeout=SILENT_S)
        for look in answered:
            rank = looks[look]
            said = rank.answer()
            # one that has saved, or is done, waits for no other
            if rank.status in (None, 0, STOPPED) or first_failure is not None:
                continue
            print(said, flush=True)
            first_failure = rank.status
            for other in running:
                other.send(signal.SIGTERM)
        if first_failure is not None:
            kill_at = min(kill_at, time.monotonic() + END_S)
        if time.monotonic() >= kill_at:
            break
        time.sleep(POLL_S)
    if first_failure is not None:
        # as a shell reports a process that a signal has ended
        return 128 - first_failure if first_failure < 0 else first_failure
    # only 0 and STOPPED are left, since each other status is a failure
    return max(rank.status or 0 for rank in ranks)


def main() -> int:
    """Parse the command line and run the job."""
    parser = argparse.ArgumentParser(prog="python -m onward.infra.job.ray_ranks")
    parser.add_argument("--ask", action="store_true", help="only print why the cluster cannot take the ranks")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cpus", type=int, default=1, help="of each rank")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("words", nargs="*", help="the command of each rank")
    arguments = parser.parse_args()
    connect()
    nodes = living_nodes()
    needs = needs_of(arguments, nodes)
    if arguments.ask:
        if missing := needs.missing(nodes):
            print(missing)
        return 0
    signals = Signals()
    signals.install()
    with bundles_of(needs, signals) as group:
        ranks = start_ranks(group, arguments.words)
        try:
            return watch(ranks, signals)
        finally:
            # a rank ends with its actor, also one that has not answered
            for rank in ranks:
                ray.kill(rank.actor)


if __name__ == "__main__":
    sys.exit(main())
