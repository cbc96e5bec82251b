"""Request bodies: limits how long they take to arrive, their size, their total size and the rate of parsing.

The limits hold on any ASGI server.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, Rejected
from server.http.middleware import CLOSE, HttpMiddleware, refuse
from server.schemas.json_text import JsonError, parse_json, reading_seconds

DISCARD_SECONDS = 10  # how long the rest of a request is read and discarded after its response
DISCARD_BYTES = 64 * 2**20

PIECE_BYTES = 65_536  # maximum size of a piece of a response that is passed to the ASGI server

COSTLY_SECONDS = 0.001
"""Bodies that take longer to parse and validate are costly: they block the event loop."""

WAIT_RATIO = 2
"""Costly bodies start one at a time, each after waiting for this multiple of its own time."""

MAX_STARTS_PER_TURN = 8


@dataclass
class Guard(HttpMiddleware):
    """Refuses ambiguous framing. Puts a `Guarded` between the server and the app, as `scope["state"]["guarded"]`."""

    arrival_seconds: float

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["state"]["guarded"] = Guarded(scope, receive, send, self.arrival_seconds)
        names = {name for name, _ in scope["headers"]}
        is_ambiguous = b"content-length" in names or scope["http_version"] == "1.0"
        if b"transfer-encoding" in names and is_ambiguous:  # a proxy may see other requests here: request smuggling
            message = "transfer-encoding must not be combined with content-length or HTTP/1.0"
            await refuse(Rejected("malformed_request", message, headers=CLOSE), scope, guarded.receive, guarded.send)
        else:
            await self.app(scope, guarded.receive, guarded.send)


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


class Bodies(HttpMiddleware):
    """Reads each body completely before the app parses it. Refuses a body as soon as it is too large.

    `max_bytes` limits one body. `max_total_bytes` limits the bodies of all open requests together. A parsed body takes
    up to 15 times its size.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes
        self._max_total_bytes = max(max_bytes, max_total_bytes)
        self._num_bytes = 0
        self._start_limiter = StartLimiter()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            if await self._read(body, scope, receive):
                await self._start_limiter.wait(reading_seconds(body))
                await self.app(scope, replayed(bytes(body), receive), send)
            else:
                scope["state"]["record"].aborted("disconnected")
        except Rejected as error:
            await refuse(error, scope, receive, send)
        finally:
            self._num_bytes -= len(body)

    async def _read(self, body: bytearray, scope: Scope, receive: Receive) -> bool:
        """Read the body. Return False if the client disconnects before the body is complete."""
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return False
            piece = message.get("body", b"")
            if len(body) + len(piece) > self._max_bytes:
                raise self._too_large()
            if self._num_bytes + len(piece) > self._max_total_bytes:
                reason = f"the bodies of open requests have reached {self._max_total_bytes:,} bytes; retry later"
                raise Rejected("bodies_too_large", reason, retry_after_seconds=1, headers=CLOSE)
            self._num_bytes += len(piece)
            body += piece
            if not message.get("more_body"):
                return True

    def _too_large(self) -> Rejected:
        return Rejected("body_too_large", f"the request body exceeds {self._max_bytes:,} bytes", headers=CLOSE)


class StartLimiter:
    """Limits how many requests start in one turn of the event loop, so that streams can write between turns.

    A request with a costly body first waits in a separate queue, for a time proportional to its cost.
    """

    def __init__(self) -> None:
        self._costly_bodies = asyncio.Lock()
        self._starts = asyncio.Semaphore(MAX_STARTS_PER_TURN)

    async def wait(self, seconds: float) -> None:
        """Wait for the turn of a request whose body takes `seconds` to parse and validate."""
        if seconds > COSTLY_SECONDS:
            async with self._costly_bodies:
                await asyncio.sleep(seconds * WAIT_RATIO)
        await self._starts.acquire()
        asyncio.get_running_loop().call_soon(self._starts.release)  # in the next turn


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body in one message, then the messages of the given `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class JsonRoute(APIRoute):
    """A route that reads JSON by our own parser: FastAPI's accepts duplicate keys."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except JsonError as error:
            raise ApiError(f"the body {error}", param=error.param, code="invalid_json") from error
