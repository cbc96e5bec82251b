"""Limits on a request's way between the ASGI server and the app. They hold on any ASGI server."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from server.errors import Rejected
from server.http.middleware import CLOSE, HttpMiddleware, refuse

DISCARD_SECONDS = 10  # how long the rest of a request is read and discarded after its response
DISCARD_BYTES = 64 * 2**20

PIECE_BYTES = 65_536  # maximum size of a piece of a response that is passed to the ASGI server


@dataclass
class Guard(HttpMiddleware):
    """Refuses ambiguous framing. Puts a `Guarded` between the server and the app, as `scope["state"]["guarded"]`."""

    arrival_seconds: float

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["state"]["guarded"] = Guarded(scope, receive, send, self.arrival_seconds)
        if is_ambiguous(scope):
            message = "transfer-encoding must not be combined with content-length or HTTP/1.0"
            await refuse(Rejected("malformed_request", message, headers=CLOSE), scope, guarded.receive, guarded.send)
        else:
            await self.app(scope, guarded.receive, guarded.send)


def is_ambiguous(scope: Scope) -> bool:
    """Return whether a proxy may have split the connection's requests differently (request smuggling)."""
    names = {name for name, _ in scope["headers"]}
    return b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0")


class Guarded:
    """A request and its response.

    - If the request has not arrived after `arrival_seconds`, `receive` raises `Rejected`.
    - If the response ends before the request was read, the rest of the request is read and discarded before the last
      message. Otherwise TCP would send a reset, and the client might lose the response.
    - While the server is leaving, each response closes its connection.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, arrival_seconds: float) -> None:
        self.num_sent = 0
        """Bytes of the response that the ASGI server has taken."""
        self.num_unsent = 0
        """Further bytes of the response that wait."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._arrival_seconds = arrival_seconds
        self._arrives_until = asyncio.get_running_loop().time() + arrival_seconds
        self._is_read = False

    async def receive(self) -> Message:
        if self._is_read:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._arrives_until):
                return await self._next_of_request()
        except TimeoutError:
            message = f"the server did not receive the whole request within {self._arrival_seconds:g} seconds"
            raise Rejected("request_timeout", message, headers=CLOSE) from None

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            if self._scope["app"].state.service.admission.is_leaving:
                MutableHeaders(scope=message).update(CLOSE)
            await self._send(message)
            return
        body, has_more = message.get("body", b""), message.get("more_body", False)
        is_held = not has_more and not self._is_read
        for start in range(0, len(body) or 1, PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            self.num_unsent = len(body) - start
            is_last = start + PIECE_BYTES >= len(body) and not has_more and not is_held
            await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})
            self.num_sent += len(piece)
        self.num_unsent = 0
        if is_held:
            await self._discard_request()
            await self._send({"type": "http.response.body", "body": b""})

    async def _next_of_request(self) -> Message:
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def _discard_request(self) -> None:
        num_left = DISCARD_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._is_read and num_left > 0:
                    num_left -= len((await self._next_of_request()).get("body", b""))
