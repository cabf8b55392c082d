"""A real S3 server, SeaweedFS, on 127.0.0.1, and a proxy in front of it whose connections can be cut."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest
import s3fs

WEED = Path(sys.prefix) / "bin" / "weed"
KEY, SECRET = "test-key", "test-secret"


@dataclass
class S3Server:
    """The server's process and where it keeps its data."""

    folder: Path
    ports: dict[str, int]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again after `kill` with the same data; returns when it answers."""
        words = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}", "-filer", "-s3", "-volume.max=30"]
        words += [f"-{name}={port}" for name, port in self.ports.items()]
        words += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self.folder / 's3.json'}",
            "-master.volumeSizeLimitMB=64",
        ]
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen([WEED, "server", *words], stdout=log, stderr=log)
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.ports['s3.port']}")
        deadline = time.monotonic() + 60
        while True:
            try:
                if "bucket" not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket="bucket")
                client.put_object(Bucket="bucket", Key="probe", Body=b"1")
                return
            except Exception:
                assert time.monotonic() < deadline, (self.folder / "weed.log").read_text()[-2000:]
                time.sleep(0.3)

    def kill(self) -> None:
        """End it as a power failure does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for port in self.ports.values():  # each has one beside it, 10,000 above, for its own messages
            for left in [
                *Path("/tmp").glob(f"seaweedfs-*-{port}.sock"),
                *Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"),
            ]:
                left.unlink(missing_ok=True)


@dataclass
class Faults:
    """What a proxy does to the connections through it."""

    port: int = 0
    is_down: bool = False
    """Close every connection at once."""
    cut_after: int = 0
    """Close a connection after so many bytes from the client; 0 = never."""
    cuts: int = 0
    sent_bytes: int = 0
    """To the client, over all connections."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def faulty_proxy(target: int) -> Iterator[Faults]:
    """A port that passes connections on to `target`, with faults."""
    faults = Faults()

    class Passing(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if faults.is_down:
                return
            came = 0
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", target)) as server:
                ends = {self.request: server, server: self.request}
                while True:
                    for end in select.select(list(ends), [], [], 1)[0]:
                        data = end.recv(65536)
                        came += len(data) * (end is self.request)
                        with faults.lock:
                            faults.sent_bytes += len(data) * (end is server)
                        is_cut = faults.is_down or 0 < faults.cut_after < came
                        if is_cut:
                            with faults.lock:
                                faults.cuts += 1
                        if is_cut or not data:
                            return
                        ends[end].sendall(data)
                    if faults.is_down:
                        return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Passing) as proxy:
        faults.port = proxy.server_address[1]
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield faults
        finally:
            proxy.shutdown()
            thread.join()


@contextlib.contextmanager
def s3_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket; the environment names it for this process and for those that it starts."""
    folder.mkdir()
    who = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    with contextlib.ExitStack() as held:
        ports = {}
        for name in ("master.port", "volume.port", "filer.port", "s3.port"):
            taken = held.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            while taken.getsockname()[1] > 55_000:
                taken = held.enter_context(socket.socket())
                taken.bind(("127.0.0.1", 0))
            ports[name] = taken.getsockname()[1]
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}", "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # those of a test before name another server
    server = S3Server(folder, ports)
    try:
        server.start()
        yield server
    finally:
        server.kill()
