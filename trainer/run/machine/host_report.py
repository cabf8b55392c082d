"""What this host has that a job needs: `python -m onward.trainer.run.machine.host_report`, over ssh, before a launch.

    asker, on the head host                          this program, on each host
    HostQuestion on stdin, one line             -->
                                                <--  HostReport, one line; listens at its address
    connects to that address
    the port at which it listens itself         -->  connects back
                                                <--  why it could not, or an empty line
    closes stdin                                -->  ends

A line of it begins with LINE: the shell of a login may print something first. Imports neither torch nor MPI.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from onward.trainer.run.machine.this_machine import torch_version
from onward.trainer.run.record_base import Record

LINE = "onward host: "
CONNECT_S = 5.0
"""Longest time in which another host must accept a connection."""
VERSION_S = 10.0
FILE_BYTES = 1 << 16
"""What a disk must take."""
COMPARED = ("mpi4py", "numpy", "onnx")
"""Packages whose versions are compared, beside torch."""
SOURCE = "Onward (digest of its source)"
LAUNCHER = "MPI"


class HostQuestion(Record):
    """What a host is asked."""

    folder: str
    """A directory that all hosts have to share."""
    nonce: str
    """The content of the file `name` in it."""
    name: str
    """"" = there is no such file."""
    files: dict[str, str]
    """Setting -> the file that it names, which all ranks read."""
    launcher: str
    """The program that starts the ranks, of which each host needs the same version; "" if hosts do not need it."""
    daemon: str
    """The program that it starts on each host; "" if there is none."""
    has_store: bool = False
    """Whether a host with a home of its own gets the run, and the files that settings name, from a store."""


class HostReport(Record):
    """What a host has."""

    name: str
    """As the host calls itself."""
    versions: dict[str, str]
    problems: tuple[str, ...]
    """What is wrong there, as clauses with what to do; the name of the host stands in front of them."""
    clock: float
    """Its time, in seconds since 1970."""
    address: str = ""
    """By which ssh has reached it; "" on the head host."""
    network: str = ""
    """The network of that address, such as "10.0.0.0/24"; "" if the host itself has another address."""
    head: str = ""
    """The address of the head host, as this host sees it."""
    has_own_home: bool = False
    """Whether it does not share `folder`, and gets the run from a store."""
    port: int = 0
    """At which it listens until its asker has ended; 0 = it does not."""


def report(question: HostQuestion, address: str, head: str, port: int) -> HostReport:
    """Return what this host has. address, head, port: as of `HostReport`."""
    has_own_home = question.has_store and bool(question.name) and not _is_shared(question)
    return HostReport(
        name=socket.gethostname(),
        versions=dict(_versions(question)),
        problems=tuple(_problems(question, has_own_home=has_own_home)),
        has_own_home=has_own_home,
        address=address,
        network=network_of(address),
        head=head,
        port=port,
        # last, because the asker compares it with the time at which the report comes
        clock=time.time(),
    )


def network_of(address: str) -> str:
    """Return the network of one of this host's IPv4 addresses as 10.0.0.0/24; "" if the host does not have it."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.address == address and entry.family == socket.AF_INET and entry.netmask:
                return str(ipaddress.IPv4Network(f"{address}/{entry.netmask}", strict=False))
    return ""


def source_digest() -> str:
    """Return a digest of the source files of the trainer, which the hosts of a job may have in different versions."""
    folder = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _versions(question: HostQuestion) -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "torch", torch_version() or "none"
    for name in COMPARED:
        # what is missing on all hosts is not needed
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
    yield SOURCE, source_digest()
    if question.launcher and os.access(question.launcher, os.X_OK):
        command = [question.launcher, "--version"]
        # a host that is slow now is no reason to refuse it: nothing is compared then
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_S).stdout
            yield LAUNCHER, (said.strip().splitlines() or ["unknown"])[0]


def _problems(question: HostQuestion, *, has_own_home: bool) -> Iterator[str]:
    files = question.files
    if has_own_home:
        files = {}
        yield from _problems_of_own_home(Path(question.folder))
    else:
        yield from _problems_of_folder(question, Path(question.folder))
    for setting, path in files.items():
        try:
            with Path(path).open("rb") as file:
                file.read(1)
        except OSError as error:
            yield f"cannot read {path} ({setting}: {error.strerror}); all hosts need it under the same path"
    yield from _problems_of_temporary_files()
    if question.daemon and not os.access(question.daemon, os.X_OK):
        yield f"has no {question.daemon}, which mpirun starts there; install the same MPI under the same path"


def _problems_of_own_home(folder: Path) -> Iterator[str]:
    """Yield why this host could not write to its own directory in place of the one that hosts share."""
    place = next(each for each in (folder, *folder.parents) if each.is_dir())
    if reason := _why_no_file(place):
        yield f"cannot write to {place} ({reason}); make room there, or let the user of the ranks write there"


def _problems_of_temporary_files() -> Iterator[str]:
    """Yield why the launcher and the ranks could not write temporary files on this host."""
    # not `tempfile.gettempdir`, which takes another directory in place of a full one
    folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    if folder.is_dir() and (reason := _why_no_file(folder)):
        yield f"cannot write temporary files to {folder} ({reason}); make room there, or set another TMPDIR"


def _why_no_file(folder: Path) -> str:
    """Return why a directory takes no file of FILE_BYTES; "" if it does."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(FILE_BYTES))
    except OSError as error:
        return _reason(error)
    return ""


def _is_shared(question: HostQuestion) -> bool:
    """Return whether this host has the directory of the host that asks."""
    with contextlib.suppress(OSError):
        return (Path(question.folder) / question.name).read_text() == question.nonce
    return False


def _problems_of_folder(question: HostQuestion, folder: Path) -> Iterator[str]:
    if not question.name:
        return
    shared = "put ONWARD_HOME on a file system that all hosts have under the same path"
    if not _is_shared(question):
        yield (
            f"does not see what the first host has written to {folder}: the directory is not shared; {shared}, or set "
            "checkpoint.store, from which such a host gets the run"
        )
    else:
        own = folder / f"{question.name}-{socket.gethostname()}"
        try:
            own.touch()
            own.unlink()
        except OSError as error:
            yield f"cannot write to {folder} ({_reason(error)}); let the user of the ranks write there, or {shared}"


def _reason(error: OSError) -> str:
    """Return what the system says of an error, in lower case.

    As the system writes it, "No space left on device" would count as a full disk of the host that asks
    (trainer/run/outcomes/storage.py).
    """
    return (error.strerror or str(error)).lower()


def main() -> None:
    """Answer one question."""
    question = HostQuestion.model_validate_json(sys.stdin.readline())
    # the client's address and port, and those of this host
    head, _, address, _ = os.environ.get("SSH_CONNECTION", "   ").split(" ")[:4]
    with contextlib.ExitStack() as stack:
        port = 0
        with contextlib.suppress(OSError):  # an address that is not this host's own, such as behind a router
            if network_of(address):
                port = stack.enter_context(socket.create_server((address, 0))).getsockname()[1]
        print(f"{LINE}{report(question, address, head, port).model_dump_json()}", flush=True)
        if asked := sys.stdin.readline().strip():
            print(f"{LINE}{why_not_reached(head, int(asked))}", flush=True)
        sys.stdin.read()


def why_not_reached(address: str, port: int) -> str:
    """Return why nothing accepts a connection there; "" if something does."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
