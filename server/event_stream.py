"""A response of server-sent events that ends when its client goes away, and says that it lives while it waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import WRITE
from server.disconnect import disconnected

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"

Write = Callable[[bytes], Awaitable[None]]
"""Adds to a body that has begun."""


class EventStream(Response):
    """Sends the events that `events` gives, in lists of those that come at the same time.

    The status line waits for the first of them or for the first keep-alive, so that what fails before can still be
    answered with a status of its own; `on_failure` gives the last events for a later failure. A client that does not
    take what it is sent for `slow_client_seconds` is given up. `on_close` is called in every case, even if nothing
    could be sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[list[bytes]],
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
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds
        self._slow_client_seconds = slow_client_seconds
        self._on_failure = on_failure
        self._on_abort = on_abort
        self._on_close = on_close
        self._has_started = False
        self._sending_since: float | None = None
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._write: Write = scope.get("extensions", {}).get(WRITE) or partial(send_piece, send)
        jobs = self._stream(), disconnected(receive), self._live(), self._watch()
        tasks = [asyncio.create_task(job) for job in jobs]
        leaving = tasks[1]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if done == {leaving}:
                self._on_abort("disconnected")
            for task in done - {leaving}:
                task.result()
        except SlowClient:
            self._on_abort("slow_client")
        finally:
            for task in tasks:
                task.cancel()
            self._on_close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self) -> None:
        try:
            async for events in self._events:
                await self._tell(framed(events))
        except Exception as error:
            if not self._has_started:
                raise
            await self._tell(framed(self._on_failure(error)))
        self._sending_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": b""})

    async def _tell(self, piece: bytes) -> None:
        self._sending_since = self._sending_since or time.monotonic()
        if not self._has_started:
            self._has_started = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._send(start)
        await self._write(piece)
        self._sending_since, self._sent_at = None, time.monotonic()

    async def _live(self) -> None:
        """A comment whenever nothing else was sent for a while."""
        self._sent_at = time.monotonic()
        while True:
            await asyncio.sleep(self._sent_at + self._keep_alive_seconds - time.monotonic())
            if self._sending_since is not None:
                await asyncio.sleep(self._keep_alive_seconds)
            elif time.monotonic() >= self._sent_at + self._keep_alive_seconds:
                await self._tell(KEEP_ALIVE)

    async def _watch(self) -> None:
        """Raise once a piece has been waiting for too long. One timer for the stream is cheaper than one for each."""
        while True:
            since = self._sending_since
            await asyncio.sleep(self._slow_client_seconds + (since - time.monotonic() if since else 0))
            if since and self._sending_since == since:
                raise SlowClient


class SlowClient(Exception):
    """The client has not taken what it was sent."""


def framed(events: list[bytes]) -> bytes:
    return b"".join(b"data: %b\n\n" % event for event in events)


async def send_piece(send: Send, piece: bytes) -> None:
    """For servers that know no shorter way."""
    await send({"type": "http.response.body", "body": piece, "more_body": True})
