"""Raw requests to a server on 127.0.0.1, with headers that no browser or library would send."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket


def ask(
    port: int, path: str = "/", *, host: str = "", login: str = "", method: str = "GET", body: str = "", **headers: str
) -> tuple[int, str]:
    """Send one request; return the status and the text of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    if login:
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    if body:
        headers["Content-Type"] = "application/json"
    with contextlib.closing(connection):
        connection.request(method, path, body or None, {"Host": host or f"127.0.0.1:{port}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def handshake(port: int, path: str, *, host: str = "", **headers: str) -> str:
    """Begin a WebSocket; return the status line of the answer."""
    lines = {"Host": host or f"127.0.0.1:{port}", "Upgrade": "websocket", "Connection": "Upgrade"}
    lines |= {"Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==", "Sec-WebSocket-Version": "13", **headers}
    request = f"GET {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stream:
        stream.sendall(request.encode())
        return stream.recv(4096).decode(errors="replace").partition("\r\n")[0]
