"""A response of server-sent events, with keep-alive comments. The response ends when the client disconnects."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import structlog
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nvium_core import EngineError
from server.errors import ApiError, as_api_error
from server.telemetry.record import RequestRecord

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"
LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\x85".encode(): b"\\u0085"}
"""Characters that some clients wrongly treat as line ends, with their JSON escapes."""


log = structlog.get_logger("nvium.server")


class EventSource(Protocol):
    def listen(self, listener: Callable[[], object]) -> None:
        """Call the listener whenever events arrive."""

    def take(self) -> list[bytes] | None:
        """Return the events since the last call, or None after the last. Raise the source's error if it failed."""

    def close(self) -> None:
        """End the source early. This is always called, even if nothing could be sent."""


class EventStream(Response):
    """Sends the events of a source. Events that arrive together, or while others are sent, are sent together.

    The status line is sent with the first event or keep-alive. A failure before that is answered with an error status.
    A later failure is the last event. The connection disconnects a client that reads too slowly.
    """

    media_type = "text/event-stream"

    def __init__(self, source: EventSource, *, headers: Mapping[str, str], keep_alive_seconds: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self._source = source
        self._keep_alive_seconds = keep_alive_seconds
        self._has_started = False
        self._is_due = asyncio.Event()
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            await unless_disconnected(self._stream(scope["state"]["record"]), scope, receive)
        finally:
            keeping_alive.cancel()
            self._source.close()

    async def _stream(self, record: RequestRecord) -> bool:
        """Send everything: events, keep-alives and the end of the response. Return True."""
        try:
            self._source.listen(self._is_due.set)
            while (events := self._source.take()) is not None:
                if events:
                    await self._send_piece(framed(events))
                elif self._silent_seconds >= self._keep_alive_seconds:
                    await self._send_piece(KEEP_ALIVE)
                else:
                    self._is_due.clear()
                    await self._is_due.wait()
        except Exception as error:
            if not self._has_started:
                raise
            await self._send_piece(broken_off(error, record))
        await self._send({"type": "http.response.body", "body": b""})
        return True

    async def _send_piece(self, piece: bytes) -> None:
        if not self._has_started:
            self._has_started = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sent_at = time.monotonic()

    @property
    def _silent_seconds(self) -> float:
        return time.monotonic() - self._sent_at

    async def _keep_alive(self) -> None:
        """Wake `_stream` whenever nothing was sent for `keep_alive_seconds`. One timer per event would cost more."""
        while True:
            is_due = self._silent_seconds >= self._keep_alive_seconds
            await asyncio.sleep(self._keep_alive_seconds - (0 if is_due else self._silent_seconds))
            self._is_due.set()


def broken_off(error: Exception, record: RequestRecord) -> bytes:
    """Record an error after the status line. Return the end of the stream."""
    if not isinstance(error, EngineError | ApiError):
        log.error("stream failed", request_id=record.request_id, exc_info=error)
    refusal = as_api_error(error)
    record.refused(refusal)
    return framed([to_json(refusal.body), DONE])


def framed(events: list[bytes]) -> bytes:
    """Frame events for the wire. An event with an `event:` line must contain its own `data:` line."""
    return b"".join([b"%b%b\n\n" % (b"" if each[:6] == b"event:" else b"data: ", on_one_line(each)) for each in events])


def on_one_line(event: bytes) -> bytes:
    if b"\xe2\x80" in event or b"\xc2\x85" in event:
        for character, escape in LINE_ENDS.items():
            event = event.replace(character, escape)
    return event


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Coroutine[Any, Any, T], scope: Scope, receive: Receive) -> T | None:
    """Return the result of the work. If the client disconnects first, cancel the work, record it and return None."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        scope["state"]["record"].aborted("disconnected")
        return None
    finally:
        working.cancel()
        leaving.cancel()
