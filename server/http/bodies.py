"""The layer that reads bodies: bounds on the size of each and of all, and on how many are parsed in a turn."""

import asyncio
from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, BodiesTooLarge, BodyTooLarge, MalformedRequest
from server.http.middleware import refuse
from server.http.shares import Shares
from server.telemetry.metrics import Metrics

LARGE_BYTES = 100_000
BYTES_PER_SECOND = 10_000_000
"""The rate at which large bodies are admitted. Parsing them blocks the event loop but is several times as fast."""

MAX_BEGUN_IN_A_TURN = 8

MAX_CONTAINERS = 50_000
"""Lists and objects in one body. Parsed, `[]` takes thirty times the memory of text and hundreds of times the time."""


class Bodies:
    """Reads each body completely before it is parsed, and refuses it as soon as it is too large.

    `max_bytes` bounds one body, `max_bytes_present` the bodies of all unanswered requests, which keys share: a parsed
    body takes up to fifteen times its size.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_bytes_present: int, metrics: Metrics) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._shares = Shares(max(max_bytes, max_bytes_present))
        self._metrics = metrics
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            await self._serve(body, scope, receive, send)
        finally:
            self._shares.give_back(len(body), scope["state"]["key_id"])

    async def _serve(self, body: bytearray, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            is_whole = await self._read(body, scope, receive)
        except ApiError as error:
            await refuse(error, self._metrics, scope, receive, send)
            return
        if is_whole:
            await self._turnstile.pass_through(len(body))
            await self._app(scope, replayed(bytes(body), receive), send)
        elif record := scope["state"]["record"]:
            record.aborted("disconnected")

    async def _read(self, body: bytearray, scope: Scope, receive: Receive) -> bool:
        """False if the client disconnected before the end of the body."""
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
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
            raise BodyTooLarge(self._max_bytes)
        if not self._shares.fits(len(piece), key, of_request=len(body)):
            raise BodiesTooLarge(self._shares.capacity)
        self._shares.take(len(piece), key)
        body += piece


class Turnstile:
    """Limits how many requests begin in one turn of the event loop, so that streams are written in between.

    Large bodies first wait in their own queue, in proportion to their size.
    """

    def __init__(self) -> None:
        self._line_of_large = asyncio.Lock()
        self._line = deque[asyncio.Future[None]]()
        self._num_begun = 0
        """Requests begun in this turn."""

    async def pass_through(self, num_bytes: int) -> None:
        if num_bytes > LARGE_BYTES:
            async with self._line_of_large:
                await asyncio.sleep(num_bytes / BYTES_PER_SECOND)
        loop = asyncio.get_running_loop()
        if self._num_begun == MAX_BEGUN_IN_A_TURN:
            self._line.append(place := loop.create_future())
            await place
            return
        if self._num_begun == 0:
            loop.call_soon(self._begin_turn, loop)
        self._num_begun += 1

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_begun = 0
        while self._line and self._num_begun < MAX_BEGUN_IN_A_TURN:
            place = self._line.popleft()
            if not place.done():  # cancelled meanwhile
                place.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            loop.call_soon(self._begin_turn, loop)


def check_structure(body: bytearray) -> None:
    """Refuse a body that would take long to parse. Brackets inside strings are only discounted where there are many."""
    if num_containers(body) > MAX_CONTAINERS and num_containers(without_strings(body)) > MAX_CONTAINERS:
        raise MalformedRequest(f"the body has more than {MAX_CONTAINERS} lists and objects")


def without_strings(body: bytearray) -> bytes:
    """A JSON text without its strings."""
    return b"".join(bytes(body).replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])


def num_containers(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{")


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body in one message, then the messages after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
