"""From the loss of a host until it is noticed and until the training goes on without it, for every way to lose one.

    python -m tests.bench.lost_hosts [--rounds 3] [--faults "power off" cut]       15 min, as root

    power off   the host is gone from the network, and no connection is closed
    reset       its processes end at once, and its kernel closes their connections
    cut         its network cable is pulled; its processes go on
    frozen      its processes stand still; its kernel answers
    head        the host of `onward run` is frozen, and another one goes on with the run

Hosts are sets of namespaces with a network card of their own. Two ranks of a tiny model train, one on each of two
hosts, with the settings as they are but `launch.on_host_lost = "fewer"`. The first time is from the loss to the time of
`detected_ms` in the record of the attempt (of the head: until the other host has taken its lock); the second from the
loss until the next attempt has logged a step. Orphans are processes that are left on the host once it is back and the
run is over.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.support.machines import Machines, machines, missing
from tests.support.workshop import Workshop, reached, until

SETTINGS = (
    *("launch.rehearsal='off'", "launch.on_host_lost='fewer'", "train.num_steps=100000"),
    *("train.evaluation_period=0", "monitor.report_to=[]"),
)
LIMIT_S = 300.0
ORPHANS_S = 60.0
"""Time in which the processes on a host that is back must have ended."""
TAKEN = "was not renewed for 60 s"
FAULTS: dict[str, tuple[Callable[[Machines], None], Callable[[Machines], None]]] = {
    "power off": (lambda cluster: cluster.crash("h1"), lambda cluster: cluster.boot(1)),
    "reset": (lambda cluster: cluster.reset("h1"), lambda cluster: cluster.serve_ssh("h1")),
    "cut": (lambda cluster: cluster.cut("h1"), lambda cluster: cluster.heal("h1")),
    "frozen": (lambda cluster: cluster.freeze("h1"), lambda cluster: cluster.thaw("h1")),
}
"""Fault -> how it begins, and how the host comes back."""


@contextlib.contextmanager
def training(workshop: Workshop, cluster: Machines, hosts: str) -> Iterator[tuple[list[str], RunDir]]:
    """Start a run on these hosts from h0, and end it; yield its command when it has made 100 steps."""
    hostfile = workshop.root / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in hosts.split()))
    words = [sys.executable, "-m", "onward.flows.cli", "run", str(workshop.root / "config.toml"), *SETTINGS]
    words += [f"launch.hostfile='{hostfile}'", "--name", f"run-{time.monotonic_ns()}", "--continue"]
    command = cluster.start(words, workshop.environment, workshop.root / "run.log")
    try:
        run = workshop.new_run()
        until(lambda: reached(run, 100), limit_s=LIMIT_S)
        yield words, run
    finally:
        _end(command)


def _end(command: subprocess.Popen[bytes]) -> None:
    """Stop a command in order, as Ctrl-C does."""
    # it is a child of the process that entered the namespaces of its host
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(command.pid).children():
            process.terminate()
    command.wait(LIMIT_S)


def orphans(cluster: Machines, name: str) -> int:
    """Return how many processes are left on a host after ORPHANS_S: of Onward, of MPI, of a shell, of any other."""
    deadline = time.monotonic() + ORPHANS_S
    while (left := _started_on(cluster, name)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for command in left:
        print(f"left on {name}: {command}", file=sys.stderr)
    return len(left)


def _started_on(cluster: Machines, name: str) -> list[str]:
    """Return the commands of the processes of a host but those that it has from its start."""
    found = []
    for process in cluster.processes(name):
        with contextlib.suppress(psutil.Error):
            if process.name() not in ("sshd", "sleep") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def lose(workshop: Workshop, cluster: Machines, fault: str) -> tuple[float, float, int]:
    """Return the seconds until a lost host is noticed and until the run goes on, and the orphans."""
    begin, end = FAULTS[fault]
    with training(workshop, cluster, "h0 h1") as (_, run):
        began_at = time.time()
        begin(cluster)
        until(lambda: reached(run, 0, attempt=2), limit_s=LIMIT_S)
        recovered_s = time.time() - began_at
        noticed_s = endings(run)[0].detected_ms / 1000 - began_at
    end(cluster)
    return noticed_s, recovered_s, orphans(cluster, "h1")


def lose_head(workshop: Workshop, cluster: Machines) -> tuple[float, float, int]:
    """Likewise, of the host that the run was started on; the other one gets the same command at once."""
    log = workshop.root / "taken.log"
    with training(workshop, cluster, "h1 h2") as (words, run):
        began_at = time.time()
        cluster.freeze("h0")
        second = cluster.start(words, workshop.environment, log, host="h1")
        try:
            until(lambda: TAKEN in log.read_text(), limit_s=LIMIT_S)
            noticed_s = time.time() - began_at
            until(lambda: reached(run, 0, attempt=2), limit_s=LIMIT_S)
            recovered_s = time.time() - began_at
        finally:
            cluster.thaw("h0")
            _end(second)
    return noticed_s, recovered_s, orphans(cluster, "h0")


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", nargs="*", choices=[*FAULTS, "head"], default=[*FAULTS, "head"])
    given = parser.parse_args()
    if why := missing():
        sys.exit(why)
    print("seconds until noticed, median (worst); until the next step; orphans")
    with tempfile.TemporaryDirectory(prefix="lost-hosts-") as folder:
        workshop = Workshop.made(Path(folder))
        try:
            with machines(workshop.root / "machines", 3) as cluster:
                for fault in given.faults:
                    measure = lose_head if fault == "head" else lose
                    arguments = (workshop, cluster) if fault == "head" else (workshop, cluster, fault)
                    found = [measure(*arguments) for _ in range(given.rounds)]
                    print(described(fault, found), flush=True)
        finally:
            workshop.close()


def described(fault: str, found: list[tuple[float, float, int]]) -> str:
    """Return the line of a fault."""
    noticed, recovered, left = zip(*found, strict=True)
    times = [f"{statistics.median(each):6.1f} ({max(each):.1f})" for each in (noticed, recovered)]
    return f"{fault:>10} {times[0]} {times[1]}   {max(left)}"


if __name__ == "__main__":
    main()
