"""Middleware that reads request bodies. It limits the size of a body, the total size and the rate of parsing."""

import asyncio
from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import Rejected, malformed
from server.http.middleware import HttpMiddleware, refuse
from server.http.shares import Shares
from server.telemetry.metrics import Metrics

LARGE_BYTES = 100_000
BYTES_PER_SECOND = 10_000_000
"""Rate limit for parsing large bodies. The limit is far below the parser's speed: parsing blocks the event loop."""

MAX_STARTS_PER_TURN = 8

MAX_CONTAINERS = 50_000
"""Maximum number of lists and objects in a body.

Compared to a string of the same length, lists `[]` take 30 times the memory, and hundreds of times as long to parse.
"""

CLOSE = {"connection": "close"}


class Bodies(HttpMiddleware):
    """Reads each body completely before the app parses it. Refuses a body as soon as it is too large.

    `max_bytes` limits one body. `max_total_bytes` limits the bodies of all open requests together. The total is shared
    among keys. A parsed body takes up to 15 times its size.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int, metrics: Metrics) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes
        self._shares = Shares(max(max_bytes, max_total_bytes))
        self._metrics = metrics
        self._start_limiter = StartLimiter()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        try:
            if await self._read(body, scope, receive):
                await self._start_limiter.wait(len(body))
                await self._app(scope, replayed(bytes(body), receive), send)
            elif record := scope["state"]["record"]:
                record.aborted("disconnected")
        except Rejected as error:
            await refuse(error, self._metrics, scope, receive, send)
        finally:
            self._shares.give_back(len(body), scope["state"]["key_id"])

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
                self._add(body, piece, scope["state"]["key_id"])
            if not message.get("more_body"):
                check_structure(body)
                return True

    def _add(self, body: bytearray, piece: bytes, key: str) -> None:
        if len(body) + len(piece) > self._max_bytes:
            raise self._too_large()
        if not self._shares.fits(len(piece), key, held_by_request=len(body)):
            limit = f"the limit of {self._shares.capacity:,} bytes, or this key's share"
            message = f"the bodies of open requests have reached {limit}; retry later"
            raise Rejected("bodies_too_large", message, retry_after_seconds=1, headers=CLOSE)
        self._shares.take(len(piece), key)
        body += piece

    def _too_large(self) -> Rejected:
        return Rejected("body_too_large", f"the request body exceeds {self._max_bytes:,} bytes", headers=CLOSE)


class StartLimiter:
    """Limits how many requests start in one turn of the event loop, so that streams can write between turns.

    A large body first waits in a separate queue, for a time proportional to its size.
    """

    def __init__(self) -> None:
        self._large_bodies = asyncio.Lock()
        self._waiting = deque[asyncio.Future[None]]()
        self._num_started = 0
        """Requests started in this turn."""

    async def wait(self, num_bytes: int) -> None:
        if num_bytes > LARGE_BYTES:
            async with self._large_bodies:
                await asyncio.sleep(num_bytes / BYTES_PER_SECOND)
        loop = asyncio.get_running_loop()
        if self._num_started == MAX_STARTS_PER_TURN:
            self._waiting.append(place := loop.create_future())
            await place
            return
        if self._num_started == 0:
            loop.call_soon(self._start_turn, loop)
        self._num_started += 1

    def _start_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_started = 0
        while self._waiting and self._num_started < MAX_STARTS_PER_TURN:
            place = self._waiting.popleft()
            if not place.done():  # the request may have been cancelled
                place.set_result(None)
                self._num_started += 1
        if self._num_started:
            loop.call_soon(self._start_turn, loop)


def check_structure(body: bytearray) -> None:
    """Raise `Rejected` if the body has more than `MAX_CONTAINERS` lists and objects.

    Brackets in strings do not count. Removing strings is slow, so remove them only if there are too many brackets.
    """
    if num_containers(body) > MAX_CONTAINERS and num_containers(without_strings(body)) > MAX_CONTAINERS:
        raise malformed(f"the body has more than {MAX_CONTAINERS} lists and objects")


def without_strings(body: bytearray) -> bytes:
    return b"".join(bytes(body).replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def num_containers(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{")


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body in one message, then the messages of the given `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
