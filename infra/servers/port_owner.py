"""Whose program holds a port of this machine, and connections that end where it is somebody else's.

127.0.0.1 is open to every account of the machine. When one of Onward's servers has died, another account may take its
port, and the clients that go on asking would send it the login. Linux knows the user of each end of a connection:

    client --connects--> port --who holds the other end? /proc/net/tcp--> the same user: the request is sent
                                                                     +--> another one: closed, nothing was sent
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import sys
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"
"""The state of a listening socket in the kernel's tables."""
HOSTS = ("127.0.0.1", "localhost", "::1")

_ports: set[int] = set()
"""Ports at which this process speaks to programs of its own user alone."""
_connect = socket.socket.connect
_connect_ex = socket.socket.connect_ex
_sock_connect = BaseSelectorEventLoop.sock_connect


def owner_of(there: tuple[str, int], here: tuple[str, int] | None = None) -> int | None:
    """Return the user id of the program that holds the end `there` of a connection from `here`; None if none is seen.

    Without `here`, or before the connection was accepted, that is the program that listens at `there`.
    """
    ends = _written(there)
    others = _written(here) if here else set()
    # a server that listens at all addresses stands in the table with an address of zeros
    everywhere = {"0" * (len(end) - 5) + end[-5:] for end in ends}
    # the row of the accepted connection decides at once; without it, who listens at the port
    exact: set[int] = set()
    wide: set[int] = set()
    for table in TABLES:
        for row in _connections(table, ends | everywhere):
            if row.local in ends and row.remote in others and row.inode:
                return row.uid  # without an inode it waits to be accepted, and the kernel writes 0 for its user
            if row.state == LISTENS:
                (exact if row.local in ends else wide).add(row.uid)
    found = exact or wide  # a connection goes to the socket that listens at its address, if there is one
    return found.pop() if len(found) == 1 else None


def is_ours(url: str) -> bool:
    """Return whether a program of this user listens at an address of this machine."""
    parts = urlsplit(url)
    return owner_of((parts.hostname or "", parts.port or 80)) == os.geteuid()


def refuse_others(url: str) -> None:
    """Let this process connect to the port of a local address only where a program of this user holds it.

    That covers every client in it, whichever library it uses: each connection is looked at when it is made, and before
    anything is sent. Others end with ConnectionRefusedError. An address of another machine is left alone.
    """
    parts = urlsplit(url)
    if parts.hostname in HOSTS:
        # the three methods are replaced once; they ask this set at each connection
        _ports.add(parts.port or 80)
        socket.socket.connect = _checked_connect  # type: ignore[method-assign, assignment]
        socket.socket.connect_ex = _checked_connect_ex  # type: ignore[method-assign, assignment]
        BaseSelectorEventLoop.sock_connect = _checked_sock_connect  # type: ignore[method-assign, assignment]


def _checked_connect(self: socket.socket, address: Any, /) -> None:
    _connect(self, address)
    _check(self)


def _checked_connect_ex(self: socket.socket, address: Any, /) -> int:
    if number := _connect_ex(self, address):
        return number
    try:
        _check(self)
    except ConnectionRefusedError:
        return errno.ECONNREFUSED
    return 0


async def _checked_sock_connect(self: asyncio.AbstractEventLoop, connection: socket.socket, address: Any) -> None:
    await _sock_connect(self, connection, address)  # type: ignore[arg-type]
    _check(connection)  # again: `connect` of a socket that does not wait may have returned before


def _check(connection: socket.socket) -> None:
    """Raise ConnectionRefusedError if somebody else holds the other end of a connection to one of the ports."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    host, port, *_ = connection.getpeername()
    # connections to other machines and ports are none of Onward's business
    if port not in _ports or not _is_local(host):
        return
    if (uid := owner_of((host, port), connection.getsockname()[:2])) != os.geteuid():
        whose = "cannot be told whose it is" if uid is None else f"is held by user id {uid} and not by you"
        raise ConnectionRefusedError(
            errno.ECONNREFUSED,
            f"port {port} of this machine {whose}, so nothing was sent to it: Onward's server there has ended. Repeat "
            "the command, which uses another port",
        )


def _is_local(host: str) -> bool:
    address = ipaddress.ip_address(host)
    # ::ffff:127.0.0.1 is a loopback address, too, but Python says so of the mapped one only
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


class _Connection(NamedTuple):
    """One row of the kernel's tables."""

    local: str
    remote: str
    state: str
    uid: int
    inode: int


def _connections(table: Path, ends: set[str]) -> Iterator[_Connection]:
    """Yield the sockets of this machine, or of this container, with one of these ends; none without the table."""
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            # sl, local, remote, state, queues, timer, retransmits, uid, timeout, inode
            words = line.split(maxsplit=10)
            if words[1] in ends:
                yield _Connection(words[1], words[2], words[3], int(words[7]), int(words[9]))


def _written(address: tuple[str, int]) -> set[str]:
    """Return an address as the tables write it: that of IPv4 also as the part of IPv6 that stands for it."""
    host = ipaddress.ip_address("127.0.0.1" if address[0] == "localhost" else address[0])
    port = address[1]
    if isinstance(host, ipaddress.IPv4Address):
        return {_hexadecimal(host.packed, port), _hexadecimal(bytes(10) + b"\xff\xff" + host.packed, port)}
    return {_hexadecimal(host.packed, port)}


def _hexadecimal(packed: bytes, port: int) -> str:
    # the kernel prints each 32-bit word as a number of this machine
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
