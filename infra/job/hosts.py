"""The hosts of an MPI hostfile: read them, and ask over ssh, as mpirun does, which of them answer, and the time."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from onward.infra.job.mpirun import environment_of_ranks, remote_shell

MOST_BYTES = 4 << 20
"""Of a hostfile: it would name over a hundred thousand hosts."""
HOST = re.compile(r"(?:\w[\w.-]*@)?[\w\[+^][\w.:\]+-]*", re.ASCII)
"""A name or an address, as hostfiles have them, with the user before an @ if there is one."""
OPTIONS = re.compile(r"(\s*[A-Za-z_-]+\s*=\s*\w[\w.-]*)*", re.ASCII)
"""What may follow it, such as `slots=4`: mpirun would take other words for further hosts."""
PROBE_S = 15.0
"""Longest time for the answer of one host."""


def read_hostfile(path: Path) -> dict[str, int]:
    """Return host -> slots, in the order of the file. A line without a number of slots is one rank.

    Raises OSError, also if it is too large or names what is no host, and UnicodeDecodeError.
    """
    found: dict[str, int] = {}
    # some files, such as /proc/kmsg, wait for content
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        content = file.read(MOST_BYTES + 1) or b""
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"a hostfile holds at most {MOST_BYTES:,} bytes", str(path))
    for number, line in enumerate(content.decode().splitlines(), start=1):
        words = line.split("#")[0].split()
        if words:
            # ssh takes a name that begins with - for an option, such as one with a program to start
            if not HOST.fullmatch(words[0]):
                raise OSError(errno.EINVAL, f"line {number} names no host: {words[0][:80]!a}", str(path))
            options = " ".join(words[1:])
            if not OPTIONS.fullmatch(options):
                raise OSError(errno.EINVAL, f"line {number} is no HOST KEY=VALUE ...: {options[:80]!a}", str(path))
            # a host that is named twice has the slots of both lines, as mpirun counts
            said = re.search(r"\bslots\s*=\s*(\d+)", options)
            found[words[0]] = found.get(words[0], 0) + (int(said[1]) if said else 1)
    return found


def write_hostfile(path: Path, hosts: Mapping[str, int]) -> None:
    """Write a hostfile with a number of slots for each host: without one mpirun would take all cores of it."""
    path.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()))


def with_slots(path: Path, copy: Path) -> Path:
    """Return a hostfile in which each line says its slots: the one that is given, or a copy of it that does."""
    lines = (line.split("#")[0] for line in path.read_text().splitlines())
    if all("slots" in line for line in lines if line.strip()):
        return path
    write_hostfile(copy, read_hostfile(path))
    return copy


def silent_hosts(hosts: Sequence[str], users: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the hosts that do not answer, each with what ssh said. They are asked at the same time."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as threads:
        answers = threads.map(lambda host: _problem(host, users), hosts)
        return {host: problem for host, problem in zip(hosts, answers, strict=True) if problem}


def silence(silent: Mapping[str, str]) -> str:
    """Return in words which hosts do not answer."""
    named = ", ".join(f"{host} ({problem})" for host, problem in silent.items())
    return f"{len(silent)} host{'s do' if len(silent) > 1 else ' does'} not answer: {named}"


@dataclass(frozen=True)
class Skew:
    """How much the clock of a host differs from the one here."""

    seconds: float
    """Positive if it is ahead."""
    uncertain_s: float
    """Half of the time that the question took."""


def clock_skews(hosts: Sequence[str], users: Mapping[str, str] = os.environ) -> dict[str, Skew | None]:
    """Return the skew of each host; None where its clock could not be read. They are asked at the same time."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as threads:
        return dict(zip(hosts, threads.map(lambda host: _skew(host, users), hosts), strict=True))


def _skew(host: str, users: Mapping[str, str]) -> Skew | None:
    if _is_here(host):
        return Skew(0.0, 0.0)
    # the answer was made somewhere between both times, most likely in the middle
    asked_at = time.time()
    said, problem = _ask(host, users, "date +%s.%N")
    answered_at = time.time()
    try:
        return None if problem else Skew(float(said) - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2)
    except ValueError:
        return None


def _problem(host: str, users: Mapping[str, str]) -> str:
    """Return why a host does not answer; "" if it does."""
    return "" if _is_here(host) else _ask(host, users, "true")[1]


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", socket.gethostname())


def _ask(host: str, users: Mapping[str, str], question: str) -> tuple[str, str]:
    """Return what a command on a host printed, and why it could not be run; "" if it could."""
    environment = environment_of_ranks(users)
    command = [*remote_shell(environment), host, question]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PROBE_S:g} s"
    except OSError as error:
        return "", f"{command[0]} cannot be started: {error.strerror}"
    # ssh writes its reason on stderr, often over several lines
    said = " ".join(done.stderr.split())
    if done.returncode == 0:
        return done.stdout.strip(), ""
    return "", said[-300:] or f"{command[0]} ended with status {done.returncode}"
