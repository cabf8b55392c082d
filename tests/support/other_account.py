"""Another account of the machine, really another one: it takes a port of 127.0.0.1 and notes what it is sent."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

UID = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another account")

PROGRAM = """
import json, os, socket, sys, threading
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
notes = threading.Lock()

def answer(connection):
    connection.settimeout(20)
    data = b""
    try:
        while b"\\r\\n\\r\\n" not in data and (more := connection.recv(65536)):
            data += more
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}")
    except OSError:
        pass
    with notes:
        print(len(data), int(b"authorization:" in data.lower()), flush=True)
    connection.close()

while True:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(sys.argv[1])))
        listener.listen(100)
        break
    except OSError:
        listener.close()  # at once again, until it is free
print("listens at", listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=answer, args=(connection,), daemon=True).start()
"""


@dataclass
class OtherAccount:
    """What the other account has got."""

    process: subprocess.Popen[str]
    port: int = 0

    def take(self) -> None:
        """Wait until it has the port."""
        assert self.process.stdout
        self.port = int(self.process.stdout.readline().rpartition(" ")[2])

    def ended(self) -> tuple[int, int, int]:
        """End it; return the number of connections, of those over which it was sent anything, and of logins."""
        self.process.kill()
        lines = [tuple(map(int, line.split())) for line in self.process.communicate()[0].splitlines()]
        return len(lines), sum(size > 0 for size, _ in lines), sum(logins for _, logins in lines)


@contextlib.contextmanager
def other_account(port: int = 0) -> Iterator[OtherAccount]:
    """Another account that takes a port, as soon as it is free; 0 = any."""
    words = [sys.executable, "-I", "-c", PROGRAM, str(port), str(UID)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield OtherAccount(process)
        finally:
            process.kill()
