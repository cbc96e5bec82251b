"""A uvicorn server that finishes running requests before it stops."""

import asyncio
import gc
import os
import socket
import sys
import time
from types import FrameType
from typing import Any, Protocol

import structlog
import uvicorn

from server.http.admission import Admission
from server.http.reloader import Reloader
from server.settings import Settings
from server.telemetry.sink import sink

ANY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (the server does not listen here)

log = structlog.get_logger("nvium.server")

FAILED_SECONDS = 5
"""Timeout for answering open requests after the service has failed."""

GOODBYE_SECONDS = 2
"""How long idle connections stay open while draining. A request sent in this time gets a 503 instead of a reset."""

CLOSE = (b"connection", b"close")


def url_of(settings: Settings, port: int) -> str:
    """Return the server's URL on this machine."""
    scheme = "https" if settings.ssl_certfile else "http"
    host = ANY_INTERFACE.get(settings.host, settings.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


class Drainable(Protocol):
    """What an app drains at shutdown: a server's service, or the gateway in front of replicas.

    The event loop calls `tick` ten times a second.
    """

    settings: Settings
    admission: Admission

    @property
    def has_failed(self) -> bool: ...

    def tick(self) -> None: ...

    def give_up(self) -> None:
        """Fail all open requests."""


FAILURE = 1
"""Exit code if the service has failed."""


class DrainingServer(uvicorn.Server):
    """Drains at the first signal and fails open requests at the second. The exit code is 0 in both cases.

    If the service fails, the server drains for `FAILED_SECONDS` and exits with `FAILURE`. If a callback of the event
    loop raises `MemoryError`, the process exits at once.
    """

    def __init__(self, config: uvicorn.Config, service: Drainable, reloader: Reloader | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._reloader = reloader
        self._was_signalled = False
        self._drains_since: float | None = None
        self._drain_seconds: float = service.settings.drain_seconds
        self._is_logged = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._was_signalled:
            self._drain_seconds = 0
        elif self._drains_since is None:
            self._begin_to_drain()
        self._was_signalled = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        sink.drain()
        if self._service.has_failed:
            sys.exit(FAILURE)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note_error)
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # garbage collection must not scan the model: that would pause all streams
        settings = self._service.settings
        url = url_of(settings, self.config.port)
        log.info("ready", host=self.config.host, port=self.config.port, url=url, playground=settings.playground)

    async def on_tick(self, counter: int) -> bool:
        self._service.tick()
        if self._reloader:
            self._reloader.tick()
        if self._service.has_failed and self._drains_since is None:
            log.error("the service has failed, stopping")
            self._drain_seconds = FAILED_SECONDS
            self._begin_to_drain()
        if self._drains_since is not None and not self.should_exit:
            self._drain(time.monotonic() - self._drains_since)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        log.info("stopped")

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception in a callback of the event loop."""
        if isinstance(context.get("exception"), MemoryError):
            os._exit(FAILURE)
        loop.default_exception_handler(context)

    def _begin_to_drain(self) -> None:
        """Refuse new requests, and close each connection after its next response."""
        self._drains_since = time.monotonic()
        self.server_state.default_headers.append(CLOSE)
        self.config.encoded_headers.append(CLOSE)  # uvicorn copies these to `default_headers` every second
        self._service.admission.is_draining = True

    def _drain(self, seconds: float) -> None:
        """Stop once all requests and connections have ended. After `_drain_seconds`, fail open requests and stop."""
        num_present, connections = self._service.admission.num_present, self.server_state.connections
        if not self._is_logged:
            log.info("draining", choices=num_present, connections=len(connections), seconds=self._drain_seconds)
            self._is_logged = True
        if num_present == 0:
            self.should_exit = not connections or seconds > min(GOODBYE_SECONDS, self._drain_seconds)
        elif seconds > self._drain_seconds:
            log.warning("stopping before all requests have finished", choices=num_present)
            self._service.give_up()
            self.should_exit = True
