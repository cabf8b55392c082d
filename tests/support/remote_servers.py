"""A real object store (moto) and a real web server on 127.0.0.1, whose answers can be cut, slowed or forged."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import http.server
import importlib.util
import re
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package seem not to be installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )


@contextlib.contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.client]:
    """A server of S3's protocol; the environment names it for this process and for those that it starts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # those of a test before name another server
        client = boto3.client("s3")
        for bucket in client.list_buckets()["Buckets"]:  # moto keeps its buckets for the whole process
            for found in client.list_objects_v2(Bucket=bucket["Name"]).get("Contents", []):
                client.delete_object(Bucket=bucket["Name"], Key=found["Key"])
            client.delete_bucket(Bucket=bucket["Name"])
        client.create_bucket(Bucket="bucket")
        yield client
    finally:
        server.stop()


@contextlib.contextmanager
def cutting_proxy(port: int, *, after: int, times: int) -> Iterator[tuple[int, list[int]]]:
    """A port that passes connections on to `port`, and the bytes that came back over each of them.

    The first `times` connections over which more than `after` bytes come back are cut there; -1 = all.
    """
    counts: list[int] = []
    left = [times]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            number = len(counts)
            counts.append(0)
            with socket.create_connection(("127.0.0.1", port)) as server:
                ends = [self.request, server]
                while True:
                    for end in select.select(ends, [], [], 10)[0]:
                        if not (data := end.recv(65536)):
                            return
                        if end is self.request:
                            server.sendall(data)
                            continue
                        is_cut = bool(left[0]) and counts[number] + len(data) > after
                        data = data[: after - counts[number]] if is_cut else data
                        self.request.sendall(data)
                        counts[number] += len(data)
                        if is_cut:
                            left[0] -= 1
                            return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield proxy.server_address[1], counts
        finally:
            proxy.shutdown()
            thread.join()


@dataclass
class WebServer:
    """What a web server serves, and how."""

    files: dict[str, bytes]
    """Path without the leading slash -> content."""
    url: str = ""
    cut_after: int = 0
    """Close the connection after this many bytes of an answer; 0 = never."""
    cuts_left: int = 0
    """How many answers are cut; -1 = all."""
    stall_after: int = 0
    """Wait after this many bytes of an answer until it is set to 0."""
    ranges: bool = True
    etags: bool = True
    times: bool = True
    sizes: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    """Path -> the status that is answered in place of the file."""
    served: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, the header Range) of each request."""
    passwords: dict[str, str] = field(default_factory=dict)
    """Path -> the header Authorization without which status 401 is answered."""


@contextlib.contextmanager
def web_server(files: dict[str, bytes]) -> Iterator[WebServer]:
    """A web server of these files."""
    served = WebServer(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.lstrip("/").partition("?")[0]
            wanted = self.headers.get("Range", "")
            served.served.append((self.command, path, wanted))
            if path in served.passwords and self.headers.get("Authorization") != served.passwords[path]:
                served.statuses[path] = 401
            if status := served.statuses.get(path, 0 if path in served.files else 404):
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = served.files[path]
            tag = f'"{hashlib.md5(content).hexdigest()}"'
            start = int(re.findall(r"\d+", wanted)[0]) if wanted and served.ranges else 0
            if start and self.headers.get("If-Range", tag) != tag:
                start = 0
            body = content[start:]
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if served.sizes:
                self.send_header("Content-Length", str(len(body)))
            if served.etags:
                self.send_header("ETag", tag)
            if served.times:
                self.send_header("Last-Modified", email.utils.formatdate(0, usegmt=True))
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if not with_body:
                return
            if served.cut_after and served.cuts_left:
                served.cuts_left -= 1
                body = body[: served.cut_after]
                self.close_connection = True
            with contextlib.suppress(ConnectionError):
                if stall := served.stall_after:
                    self.wfile.write(body[:stall])
                    while served.stall_after:
                        time.sleep(0.02)
                    body = body[stall:]
                self.wfile.write(body)
            self.close_connection = self.close_connection or not served.sizes

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # a client that went away
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
