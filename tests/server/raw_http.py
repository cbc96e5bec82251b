"""Sends raw bytes to a server, and calls ASGI apps without a server."""

import socket
from collections.abc import Iterable
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.server.live_server import LiveServer

Headers = Iterable[tuple[str, str]]


def exchange(server: LiveServer, request: bytes, patience: float = 0.5) -> bytes:
    """Send bytes. Return all that the server sends until it closes, or is silent for `patience` seconds."""
    url = httpx.URL(server.url)
    answer = b""
    with socket.create_connection((url.host, url.port), timeout=patience) as connection:
        connection.sendall(request)
        try:
            while data := connection.recv(65536):
                answer += data
        except TimeoutError:
            pass
    return answer


def status_of(server: LiveServer, method: str, target: str, headers: Headers = ()) -> int:
    """Return the status of a request whose target is sent unchanged."""
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", "connection: close", *(f"{n}: {v}" for n, v in headers)]
    answer = exchange(server, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), patience=10)
    return int(answer.split(maxsplit=2)[1])


async def called(app: ASGIApp, method: str, path: str, headers: Headers = (), **state: Any) -> list[Message]:
    """Call an app and return the messages that it sends. Fail if the app reads the body."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": raw, "state": {"record": None, **state}}
    await app(scope, receive, send)
    return sent


class Reached:
    """An app that records the state of each request that reaches it."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.states.append(dict(scope["state"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
