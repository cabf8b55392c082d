"""The hosts of an MPI hostfile: read them, and ask over ssh, as mpirun does, which answer and what they have."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
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
"""Longest time in which a host must say that it is there."""
ANSWER_S = 90.0
"""Longest time in which a program on a host must answer: Python starts slowly where the disk is busy."""
CONNECT_S = 5.0
"""Longest time in which a host must accept a connection."""
MOST_ASKED = 32
"""Hosts that are asked at the same time."""
BUT = "it answers, but "
SSH_FAILED = 255
"""The exit status of ssh where it has not reached the host."""


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


def silent_hosts(hosts: Sequence[str]) -> dict[str, str]:
    """Return the hosts that do not answer, each with what ssh said. They are asked at the same time."""
    with ThreadPoolExecutor(MOST_ASKED) as threads:
        answers = threads.map(why_silent, hosts)
        return {host: problem for host, problem in zip(hosts, answers, strict=True) if problem}


def silence(silent: Mapping[str, str]) -> str:
    """Return in words which hosts do not answer, or cannot be used although they do; such a reason begins with BUT."""
    named = ", ".join(f"{host} ({problem})" for host, problem in silent.items())
    number = f"{len(silent)} host{'s' * (len(silent) > 1)}"
    if any(problem.startswith(BUT) for problem in silent.values()):
        return f"{number} cannot be used: {named}"
    return f"{number} {'do' if len(silent) > 1 else 'does'} not answer: {named}"


@dataclass(frozen=True)
class Answer:
    """What a program on a host has said."""

    problem: str = ""
    """Why it has said nothing; "" if it has."""
    has_no_program: bool = False
    """Whether ssh has reached the host, and the program could not be started there."""
    report: str = ""
    """Its first line, in JSON."""
    arrived_at: float = 0.0
    """When that came: seconds since 1970, on the clock of this host."""
    to_host: str = ""
    """Why the host could not be reached at another port than ssh's; "" if it could, or was not tried."""
    to_head: str = ""
    """Why the host could not reach this one."""


def ask_programs(
    hosts: Sequence[str], words: Sequence[str], question: str, line: str, *, limit_s: float = ANSWER_S
) -> dict[str, Answer]:
    """Ask a program on each host, at the same time; return what each has said.

    The program answers as trainer/run/machine/host_report.py describes it. line: how each of its lines begins. limit_s:
    until it must have answered.
    """
    with ThreadPoolExecutor(MOST_ASKED) as threads:
        answers = threads.map(lambda host: _converse(host, words, question, line, limit_s), hosts)
        return dict(zip(hosts, answers, strict=True))


def _converse(host: str, words: Sequence[str], question: str, line: str, limit_s: float) -> Answer:
    environment = environment_of_ranks(os.environ)
    if is_here(host):
        # of the user's own login to this host, which says nothing of the network between the hosts
        environment.pop("SSH_CONNECTION", None)
    # a directory that every host has: the one of this process may not be there
    remote = [*remote_shell(environment), host, f"cd / && exec {shlex.join(words)}"]
    command = [*words] if is_here(host) else remote
    # a login may print what is no UTF-8
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            program = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                env=environment,
            )
        except OSError as error:
            return Answer(f"{command[0]} cannot be started: {error.strerror}")
        limit = threading.Timer(limit_s, program.kill)
        limit.start()
        with program:
            try:
                found = _conversation(program, question, line)
                with contextlib.suppress(BrokenPipeError):
                    program.communicate(timeout=PROBE_S)
            except subprocess.TimeoutExpired:  # it has answered, and does not end
                program.kill()
            finally:
                limit.cancel()
        if found:
            return found
        errors.seek(0)
        said = " ".join(errors.read().split())[-300:]
    if program.returncode == -signal.SIGKILL:
        return Answer(f"no answer in {limit_s:g} s{f': {said}' if said else ''}")
    # ssh itself ends with 255, and else with the status of the program
    is_there = is_here(host) or program.returncode != SSH_FAILED
    return Answer(said or f"{command[0]} ended with status {program.returncode}", has_no_program=is_there)


def _conversation(program: subprocess.Popen[str], question: str, line: str) -> Answer | None:
    """Return what a program says to a question; None if it ends without an answer."""
    assert program.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        program.stdin.write(f"{question}\n")
        program.stdin.flush()
    report = _read(program, line)
    arrived_at = time.time()
    if report is None:
        return None
    place = json.loads(report)
    if not place["port"]:  # this host, or one that is seen through a router
        return Answer(report=report, arrived_at=arrived_at)
    to_host = ""
    try:
        socket.create_connection((place["address"], place["port"]), timeout=CONNECT_S).close()
    except OSError as error:
        to_host = str(error)
    to_head: str | None = ""
    with contextlib.suppress(OSError), socket.create_server((place["head"], 0)) as listening:
        program.stdin.write(f"{listening.getsockname()[1]}\n")
        program.stdin.flush()
        to_head = _read(program, line)
    return Answer(report=report, arrived_at=arrived_at, to_host=to_host, to_head=to_head or "")


def _read(program: subprocess.Popen[str], line: str) -> str | None:
    """Return the rest of the next line of the program's own; None at its end."""
    assert program.stdout is not None
    own = (said.removeprefix(line).strip() for said in program.stdout if said.startswith(line))
    return next(own, None)


def is_here(host: str) -> bool:
    """Return whether a name or an address is this host's."""
    host = host.rpartition("@")[2]
    own = socket.gethostname()
    if host in ("localhost", "127.0.0.1", own):
        return True
    # other names are not looked up, which may take seconds for each
    may_be = host.replace(".", "").isdigit() or host.partition(".")[0] == own.partition(".")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # only an own address can be bound
        if may_be:
            probe.bind((host, 0))
            return True
    return False


def why_silent(host: str, *, limit_s: int = 0) -> str:
    """Return why a host does not answer, as ssh says it; "" if it does. limit_s: 0 = that of ssh's own options."""
    if is_here(host):
        return ""
    environment = environment_of_ranks(os.environ)
    shell = remote_shell(environment)
    # of two values of one option ssh takes the first
    command = [shell[0], *(["-o", f"ConnectTimeout={limit_s}"] if limit_s else []), *shell[1:], host, "true"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=limit_s + 1.0 if limit_s else PROBE_S,
            env=environment,
        )
    except subprocess.TimeoutExpired as expired:
        return f"no answer in {expired.timeout:g} s"
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    # ssh writes its reason on stderr, often over several lines
    said = " ".join(done.stderr.split())
    if done.returncode == 0:
        return ""
    return said[-300:] or f"{command[0]} ended with status {done.returncode}"
