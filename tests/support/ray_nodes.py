"""A real Ray cluster of several nodes on this machine: `ray start`, once for each node, with one CPU each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.workshop import until

SMALL = ("--num-cpus=1", "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0")
ALONE = ("--node-ip-address=127.0.0.1", "--disable-usage-stats", "--include-log-monitor=false")
STATUS = """
import json, ray
from ray.util.placement_group import placement_group_table
ray.init("{address}", log_to_driver=False, logging_level=40)
free = ray.available_resources().get("CPU", 0)
groups = [each["state"] for each in placement_group_table().values()]
print(json.dumps([sum(node["Alive"] for node in ray.nodes()), free, [each for each in groups if each != "REMOVED"]]))
"""


@dataclass
class RayNodes:
    """The nodes of a cluster; the first one is its head."""

    folder: Path
    """Of Ray's own files: a short path, below which it makes sockets."""
    port: int
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its nodes and of who connects to it, with a token of its own in place of the user's."""
        token = self.folder / "token"
        if not token.exists():
            token.write_text(uuid.uuid4().hex * 2)
        own = {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        return {**os.environ, **own}

    def add(self) -> None:
        """Start a node and wait until the cluster has it."""
        # `ray start` ends when a busy machine takes more than 30 s for it
        until(self._added, limit_s=800)

    def _added(self) -> bool:
        where = [f"--address={self.address}"]
        if not self.nodes:
            where = ["--head", f"--port={self.port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        path = self.folder / f"node-{len(self.nodes)}.log"
        with path.open("wb") as log:
            node = subprocess.Popen(
                [str(Path(sys.prefix) / "bin" / "ray"), "start", "--block", *where, *SMALL, *ALONE],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)
        until(lambda: node.poll() is not None or "Ray runtime started" in path.read_text(), limit_s=400)
        if node.poll() is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        self.nodes.pop()
        print(path.read_text()[-1000:])
        return False

    def status(self) -> tuple[int, float, list[str]]:
        """Living nodes, free CPUs, and the states of placement groups that were not removed."""
        words = [sys.executable, "-c", STATUS.format(address=self.address)]
        told = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120, check=True)
        nodes, free, groups = json.loads(told.stdout)
        return nodes, free, groups

    def processes(self, name: str) -> list[psutil.Process]:
        """Ray's processes of that name on this machine, of this cluster."""
        found = []
        for process in psutil.process_iter(["name", "cmdline"]):
            if name in " ".join(process.info["cmdline"] or [process.info["name"]])[:200]:
                with contextlib.suppress(psutil.Error):
                    if any(each.pid in {node.pid for node in self.nodes} for each in process.parents()):
                        found.append(process)
        return found

    def kill_newest(self) -> None:
        """Kill the raylet of the newest node, as a crash does; its actors end with it."""
        node = self.nodes.pop()
        for process in psutil.Process(node.pid).children(recursive=True):
            if process.name() == "raylet":
                process.kill()
        node.wait(120)

    def close(self) -> None:
        for node in reversed(self.nodes):
            below: list[psutil.Process] = []
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(node.pid).children(recursive=True)
            node.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
            for process in below:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            node.kill()
            node.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def ray_nodes(number: int) -> Iterator[RayNodes]:
    """A cluster of that many nodes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    cluster = RayNodes(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")), port)
    try:
        for _ in range(number):
            cluster.add()
        yield cluster
    finally:
        cluster.close()
