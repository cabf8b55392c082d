"""Stores of gs://, az:// and hf:// on 127.0.0.1: an emulator of Google's API, and small fakes of the other two.

The fakes answer the requests that adlfs and huggingface_hub send for listing, reading in ranges and writing, and no
others. With AZURITE=host:port in the environment, the tests of az:// use an Azurite that runs there instead.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email.utils
import functools
import hashlib
import http.server
import json
import os
import re
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

# else gcsfs asks by gRPC, which the emulator does not speak, for the kind of each bucket; read when it is imported
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of the account devstoreaccount1, which every emulator of Azure's stores has."""
HUB_TOKEN = "hf_test-token"


@dataclass
class CloudStore:
    """A store, and how to reach it."""

    url: str
    """Of its bucket, container or repository, without a slash at the end."""
    port: int
    aim: Callable[[int], None]
    """Let the library of the scheme connect to this port."""
    put: Callable[[str, bytes], Any]
    get: Callable[[str], bytes]


@contextlib.contextmanager
def google_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStore]:
    """The emulator of gcp-storage-emulator, which knows no ranges, and here answers them as Google does."""
    from gcp_storage_emulator import server as emulator

    class Response(emulator.Response):
        def close(self) -> None:
            wanted = self._handler.headers.get("Range")
            if wanted and self._handler.command == "GET" and self.status == 200:
                start, stop = _span(wanted, len(self._content))
                self["Content-Range"] = f"bytes {start}-{stop - 1}/{len(self._content)}"
                self._content, self.status = self._content[start:stop], http.HTTPStatus.PARTIAL_CONTENT
            with contextlib.suppress(ConnectionError):
                super().close()

    monkeypatch.setattr(emulator, "Response", Response)
    import fsspec
    import gcsfs

    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")

    def aim(port: int) -> None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        gcsfs.GCSFileSystem.clear_instance_cache()

    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        port = server._api._httpd.server_port
        aim(port)
        storage = server._storage

        def put(name: str, content: bytes) -> None:
            gcsfs.GCSFileSystem(token="anon").pipe_file(f"bucket/{name}", content)

        yield CloudStore("gs://bucket", port, aim, put, lambda name: storage.get_file("bucket", name))
    finally:
        server.stop()


@contextlib.contextmanager
def azure_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStore]:
    """A fake of Azure's blob service with the container `bucket`; or Azurite, if AZURITE says where it runs."""
    import adlfs
    from azure.storage.blob import BlobServiceClient

    def connection(port: int) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        )

    def aim(port: int) -> None:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(port))
        adlfs.AzureBlobFileSystem.clear_instance_cache()

    if address := os.environ.get("AZURITE"):
        port = int(address.rpartition(":")[2])
        with BlobServiceClient.from_connection_string(connection(port)) as client:
            for each in client.list_containers():
                client.delete_container(each.name)
            bucket = client.create_container("bucket")
            aim(port)
            yield CloudStore(
                "az://bucket", port, aim, bucket.upload_blob, lambda name: bucket.download_blob(name).read()
            )
        return
    fake = _Fake(_answer_as_azure)
    with fake.serving() as port:
        aim(port)
        yield CloudStore("az://bucket", port, aim, fake.files.__setitem__, fake.files.__getitem__)


@contextlib.contextmanager
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStore]:
    """A fake of Hugging Face's hub with the repository of data sets me/bucket, which wants HUB_TOKEN."""
    import huggingface_hub
    from huggingface_hub import constants

    def aim(port: int) -> None:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")  # of the processes that this one starts
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.HfFileSystem.clear_instance_cache()

    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    fake = _Fake(_answer_as_hub)
    with fake.serving() as port:
        aim(port)
        yield CloudStore("hf://datasets/me/bucket", port, aim, fake.files.__setitem__, fake.files.__getitem__)


STORES: dict[str, Callable[[pytest.MonkeyPatch], contextlib.AbstractContextManager[CloudStore]]] = {
    "gs": google_store,
    "az": azure_store,
    "hf": hugging_face,
}


def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the libraries repeat a failed request once and at once, and not for a minute."""
    from azure.storage.blob._shared.policies_async import ExponentialRetry
    from gcsfs import retry
    from huggingface_hub import hf_file_system
    from huggingface_hub.utils import _http

    monkeypatch.setattr(ExponentialRetry, "get_backoff_time", lambda self, settings: 0.01)
    monkeypatch.setattr(retry, "asyncio", types.SimpleNamespace(sleep=lambda pause_s: asyncio.sleep(0.01)))
    once = functools.partial(_http.http_backoff, max_retries=1, base_wait_time=0.01)
    monkeypatch.setattr(hf_file_system, "http_backoff", once)


def _span(wanted: str, size: int) -> tuple[int, int]:
    """Return the first byte that a header Range asks for, and the one behind the last."""
    first, last = re.findall(r"bytes=(\d+)-(\d*)", wanted)[0]
    return int(first), min(int(last or size) + 1, size)


# -- fakes

Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class _Request:
    method: str
    path: str
    query: dict[str, str]
    headers: Any
    body: bytes


@dataclass
class _Fake:
    """A server of files by name, whose answers are made by a function."""

    answer: Callable[[_Fake, _Request], Answer]
    files: dict[str, bytes] = field(default_factory=dict)
    blocks: dict[str, bytes] = field(default_factory=dict)
    """Blocks that no file has yet: Azure takes them first, and then their list."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                parts = urlsplit(self.path)
                query = {name: value[0] for name, value in parse_qs(parts.query, keep_blank_values=True).items()}
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = _Request(self.command, unquote(parts.path).strip("/"), query, self.headers, body)
                status, content, headers = fake.answer(fake, request)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(b"" if self.command == "HEAD" else content)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def part(self, name: str, wanted: str | None, headers: dict[str, str]) -> Answer:
        """Answer with a file, or with the range that is wanted of it."""
        content = self.files[name]
        if not wanted:
            return 200, content, headers
        start, stop = _span(wanted, len(content))
        return 206, content[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}


def _answer_as_azure(fake: _Fake, request: _Request) -> Answer:
    """Answer in the way of Azure's REST API of blobs."""
    _, container, name = (*request.path.split("/", 2), "", "")[:3]
    common = {"x-ms-version": "2021-08-06", "x-ms-request-id": "1", "Date": email.utils.formatdate(0, usegmt=True)}
    if container != "bucket":
        return 404, b"", common | {"x-ms-error-code": "ContainerNotFound"}
    if request.method == "DELETE":
        return (404 if fake.files.pop(name, None) is None else 202), b"", common
    if request.method == "PUT" and request.headers.get("If-None-Match") == "*" and name in fake.files:
        return 409, b"", common | {"x-ms-error-code": "BlobAlreadyExists"}
    if request.method == "PUT":
        if request.query.get("comp") == "block":
            fake.blocks[request.query["blockid"]] = request.body
        elif request.query.get("comp") == "blocklist":
            found = re.findall(r"<Latest>(.*?)</Latest>", request.body.decode())
            fake.files[name] = b"".join(fake.blocks.pop(block) for block in found)
        else:
            fake.files[name] = request.body
        return 201, b"", common | (_azure_version(fake.files[name]) if name in fake.files else {})
    if not name and request.query.get("comp") == "list":
        return 200, _azure_list(fake, request.query), common | {"Content-Type": "application/xml"}
    if not name:
        return 200, b"", common | _azure_version(b"")
    if name not in fake.files:
        return 404, b"", common | {"x-ms-error-code": "BlobNotFound"}
    headers = common | _azure_version(fake.files[name]) | {"x-ms-blob-type": "BlockBlob"}
    return fake.part(name, request.headers.get("x-ms-range") or request.headers.get("Range"), headers)


def _azure_version(content: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": email.utils.formatdate(0, usegmt=True)}


def _azure_list(fake: _Fake, query: dict[str, str]) -> bytes:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    names = sorted(name for name in fake.files if name.startswith(prefix))
    rest = {name: name[len(prefix) :] for name in names}
    folders = {prefix + each.split(delimiter)[0] + "/" for each in rest.values() if delimiter and delimiter in each}
    entries = [
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{version['Last-Modified']}</Last-Modified>"
        f"<Etag>{escape(version['ETag'])}</Etag><Content-Length>{len(fake.files[name])}</Content-Length>"
        "<BlobType>BlockBlob</BlobType></Properties></Blob>"
        for name in names
        if not (delimiter and delimiter in rest[name])
        for version in [_azure_version(fake.files[name])]
    ]
    entries += [f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>" for folder in sorted(folders)]
    listed = "".join(entries)
    return (
        f"<EnumerationResults ContainerName='bucket'><Blobs>{listed}</Blobs><NextMarker/></EnumerationResults>".encode()
    )


def _answer_as_hub(fake: _Fake, request: _Request) -> Answer:
    """Answer in the way of huggingface.co: files are listed by `tree`, read by `resolve` and written by `commit`."""
    if request.headers.get("Authorization") != f"Bearer {HUB_TOKEN}":
        return 401, b"", {"X-Error-Message": "Invalid username or password."}
    if found := re.fullmatch(r"datasets/me/bucket/resolve/main/(.*)", request.path):
        if found[1] not in fake.files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        headers = {"ETag": f'"{hashlib.sha1(fake.files[found[1]]).hexdigest()}"', "X-Repo-Commit": "0" * 40}
        return fake.part(found[1], request.headers.get("Range"), headers)
    found = re.fullmatch(r"api/datasets/me/bucket(?:/(\w+(?:-\w+)?)/main)?(?:/(.*))?", request.path)
    if not found:
        return 404, b"", {"X-Error-Code": "RepoNotFound"}
    kind, folder = found[1], found[2] or ""
    if kind is None:
        return _json({"_id": "1", "id": "me/bucket", "sha": "0" * 40, "private": True, "tags": [], "downloads": 0})
    if kind == "tree":
        entries = _hub_tree(fake, folder, request.query.get("recursive", "").lower() in ("true", "1"))
        return _json(entries) if entries or not folder else (404, b"", {"X-Error-Code": "EntryNotFound"})
    if kind == "preupload":
        given = json.loads(request.body)["files"]
        return _json(
            {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in given]}
        )
    assert kind == "commit", request.path
    for line in map(json.loads, request.body.splitlines()):
        if line["key"] == "file":
            fake.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
    return _json({"commitUrl": f"http://{request.headers['Host']}/datasets/me/bucket/commit/1", "commitOid": "1"})


def _hub_tree(fake: _Fake, folder: str, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    below = {name: content for name, content in fake.files.items() if name.startswith(prefix)}
    rest = {name: name[len(prefix) :].split("/") for name in below}
    folders = {
        prefix + "/".join(parts[:depth])
        for parts in rest.values()
        for depth in range(1, len(parts) if recursive else min(len(parts), 2))
    }
    found: list[dict[str, Any]] = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
    for name, content in below.items():
        if recursive or len(rest[name]) == 1:
            oid = hashlib.sha1(content).hexdigest()
            found.append({"type": "file", "path": name, "oid": oid, "size": len(content)})
    return sorted(found, key=lambda entry: entry["path"])


def _json(value: Any) -> Answer:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}
