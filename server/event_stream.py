"""A response of server-sent events that ends when its client goes away, and says that it lives while it waits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import disconnected

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"[DONE]"


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
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.create_task(job) for job in (self._stream(send), disconnected(receive), self._live(send))]
        streaming, _, living = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
            elif streaming.done():
                streaming.result()
            else:
                self._on_abort("disconnected")
        except SlowClient:
            self._on_abort("slow_client")
        finally:
            for task in tasks:
                task.cancel()
            self._on_close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        try:
            async for events in self._events:
                await self._send(send, framed(events))
        except SlowClient:
            raise
        except Exception as error:
            if not self._has_started:
                raise
            await self._send(send, framed(self._on_failure(error)))
        await self._send(send, b"", more_body=False)

    async def _live(self, send: Send) -> None:
        """A comment whenever nothing else was sent for a while."""
        self._sent_at = time.monotonic()
        while True:
            await asyncio.sleep(self._sent_at + self._keep_alive_seconds - time.monotonic())
            if time.monotonic() >= self._sent_at + self._keep_alive_seconds:
                await self._send(send, KEEP_ALIVE)

    async def _send(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        try:
            async with asyncio.timeout(self._slow_client_seconds):
                if not self._has_started:
                    self._has_started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
        except TimeoutError as error:
            raise SlowClient from error
        self._sent_at = time.monotonic()


class SlowClient(Exception):
    """The client has not taken what it was sent."""


def framed(events: list[bytes]) -> bytes:
    return b"".join(b"data: %b\n\n" % event for event in events)
