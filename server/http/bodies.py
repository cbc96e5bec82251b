"""Reads request bodies. Limits the size of a body, the total size and the rate of parsing."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, Rejected
from server.http.middleware import CLOSE, HttpMiddleware, refuse
from server.schemas.json_text import JsonError, parse_json, reading_seconds

COSTLY_SECONDS = 0.001
"""Bodies that take longer to parse and validate are costly: they block the event loop."""

WAIT_RATIO = 2
"""Costly bodies start one at a time, each after waiting for this multiple of its own time."""

MAX_STARTS_PER_TURN = 8


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
            if piece := message.get("body"):
                self._add(body, piece)
            if not message.get("more_body"):
                return True

    def _add(self, body: bytearray, piece: bytes) -> None:
        if len(body) + len(piece) > self._max_bytes:
            raise self._too_large()
        if self._num_bytes + len(piece) > self._max_total_bytes:
            message = f"the bodies of open requests have reached {self._max_total_bytes:,} bytes; retry later"
            raise Rejected("bodies_too_large", message, retry_after_seconds=1, headers=CLOSE)
        self._num_bytes += len(piece)
        body += piece

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
