"""A response of server-sent events, with keep-alive comments. The response ends when the client disconnects."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.connection import FAST_PATH, FastPath
from server.http.disconnect import disconnected

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"
LINE_ENDS = {"\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029", "\x85".encode(): b"\\u0085"}
"""Characters that some clients wrongly treat as line ends, with their JSON escapes."""


class EventSource(Protocol):
    @property
    def is_over(self) -> bool:
        """Return whether all events have been taken."""

    def listen(self, listener: Callable[[], object]) -> None:
        """Call the listener whenever events arrive."""

    def take(self) -> list[bytes]:
        """Return the events since the last call. Raise the source's error if it has failed."""


class EventStream(Response):
    """Sends the events of a source. Events that arrive together are sent together.

    The status line is sent with the first event or keep-alive. A failure before that is answered with an error status.
    After a later failure, the stream ends with the events that `on_failure` returns. A client that reads nothing for
    `slow_client_seconds` is disconnected. `on_close` is always called, even if nothing could be sent.

    Once the response has begun, and while the client keeps up, events are written to the `FastPath` as soon as they
    arrive. At other times a task writes the events, which takes twice as long per event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: EventSource,
        *,
        headers: Mapping[str, str],
        keep_alive_seconds: float,
        slow_client_seconds: float,
        on_failure: Callable[[Exception], list[bytes]],
        on_abort: Callable[[str], None],
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self._source = source
        self._keep_alive_seconds = keep_alive_seconds
        self._slow_client_seconds = slow_client_seconds
        self._on_failure = on_failure
        self._on_abort = on_abort
        self._on_close = on_close
        self._has_started = False
        self._turn: asyncio.Future[None] | None = None
        self._sending_since: float | None = None
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._fast_path: FastPath | None = scope.get("extensions", {}).get(FAST_PATH)
        jobs = self._stream(), disconnected(receive), self._keep_alive(), self._watch()
        tasks = [asyncio.create_task(job) for job in jobs]
        disconnect = tasks[1]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if done == {disconnect}:
                self._on_abort("disconnected")
            for task in done - {disconnect}:
                task.result()
        except SlowClient:
            self._on_abort("slow_client")
            if self._fast_path:
                self._fast_path.abort()
        finally:
            for task in tasks:
                task.cancel()
            self._on_close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self) -> None:
        """Send the first event, the events that cannot take the fast path, and the end of the response."""
        try:
            self._source.listen(self._arrived)
            while (events := self._source.take()) or not self._source.is_over:
                if events:
                    await self._send_piece(framed(events))
                else:
                    self._turn = asyncio.get_running_loop().create_future()
                    await self._turn
        except Exception as error:
            if not self._has_started:
                raise
            await self._send_piece(framed(self._on_failure(error)))
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": b""})

    def _arrived(self) -> None:
        """Write arrived events to the fast path, or wake `_stream`. The source calls this; it must not raise."""
        if self._turn is None or self._turn.done():  # `_stream` is sending and will take the events
            return
        is_between_pieces = self._has_started and self._sending_since is None
        try:
            if is_between_pieces and self._fast_path and self._fast_path.is_open:
                if events := self._source.take():
                    self._fast_path.write(framed(events))
                    self._sent_at = time.monotonic()
                if not self._source.is_over:
                    return
            self._turn.set_result(None)
        except Exception as error:
            self._turn.set_exception(error)

    async def _send_piece(self, piece: bytes) -> None:
        self._sending_since = self._sending_since or time.monotonic()
        if not self._has_started:
            self._has_started = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending_since, self._sent_at = None, time.monotonic()

    async def _keep_alive(self) -> None:
        """Send a comment whenever nothing was sent for `keep_alive_seconds`."""
        self._sent_at = time.monotonic()
        while True:
            await asyncio.sleep(self._sent_at + self._keep_alive_seconds - time.monotonic())
            if self._sending_since is not None:
                await asyncio.sleep(self._keep_alive_seconds)
            elif time.monotonic() >= self._sent_at + self._keep_alive_seconds:
                await self._send_piece(KEEP_ALIVE)

    async def _watch(self) -> None:
        """Raise `SlowClient` if sending takes too long. One timer per stream is cheaper than one timer per event."""
        while True:
            since = self._sending_since
            await asyncio.sleep(self._slow_client_seconds + (since - time.monotonic() if since else 0))
            if since and self._sending_since == since:
                raise SlowClient


class SlowClient(Exception):
    """The client does not read its stream."""


def framed(events: list[bytes]) -> bytes:
    """Frame events for the wire. An event with an `event:` line must contain its own `data:` line."""
    return b"".join(b"%b\n\n" % on_one_line(event if event[:6] == b"event:" else b"data: " + event) for event in events)


def on_one_line(event: bytes) -> bytes:
    """Escape the characters of `LINE_ENDS`."""
    if b"\xe2\x80" in event or b"\xc2\x85" in event:
        for character, escape in LINE_ENDS.items():
            event = event.replace(character, escape)
    return event
