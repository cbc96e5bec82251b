"""A response of server-sent events that ends when its client goes away, and says that it lives while it waits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import disconnected

KEEP_ALIVE = b": keep-alive\n\n"
DONE = "[DONE]"


class EventStream(Response):
    """Sends each item of `events` as one event. `on_close` is called in every case, even if nothing could be sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        *,
        headers: Mapping[str, str],
        keep_alive_seconds: float,
        on_disconnect: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds
        self._on_disconnect = on_disconnect
        self._on_close = on_close
        self._sent = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.create_task(job) for job in (self._stream(send), disconnected(receive), self._live(send))]
        streaming, leaving, _ = tasks
        try:
            await asyncio.wait((streaming, leaving), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
            else:
                self._on_disconnect()
        finally:
            for task in tasks:
                task.cancel()
            self._on_close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            self._sent.set()
            await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _live(self, send: Send) -> None:
        """A comment whenever nothing else was sent for a while."""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_seconds):
                    await self._sent.wait()
                self._sent.clear()
            except TimeoutError:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
