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
from server.http.renewal import Renewal
from server.settings import Settings
from server.telemetry.sink import sink

ANY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (it is not listened on here)

log = structlog.get_logger("nvium.server")

FAILED_SECONDS = 5
"""Timeout for answering open requests after a failure."""

GOODBYE_SECONDS = 2
"""How long open connections may bring another request, whose answer says that the server drains. Closing them at once
would lose a request that is on its way."""

CLOSE = (b"connection", b"close")


def url_of(settings: Settings, port: int) -> str:
    """The server's URL on this machine."""
    scheme = "https" if settings.ssl_certfile else "http"
    host = ANY_INTERFACE.get(settings.host, settings.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


class Drainable(Protocol):
    """The service or gateway behind an app."""

    settings: Settings
    admission: Admission

    @property
    def has_failed(self) -> bool:
        """Nothing can be answered any more."""

    def tick(self) -> None:
        """Called ten times a second."""

    def give_up(self) -> None:
        """Fail the requests that still run. Called on the event loop."""


FAILURE = 1
"""The exit code of a server whose service has failed."""


class DrainingServer(uvicorn.Server):
    """The first signal drains, the second fails what still runs; the exit code is 0 either way.

    A service that has failed drains too, but only briefly, as nothing can be computed any more. An event loop without
    memory ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, service: Drainable, renewal: Renewal | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._renewal = renewal
        self._was_told = False
        self._began_to_drain: float | None = None
        self._drain_seconds: float = service.settings.drain_seconds
        self._is_logged = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._was_told:
            self._drain_seconds = 0
        elif self._began_to_drain is None:
            self._begin_to_drain()
        self._was_told = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Exits with `FAILURE` where the service has failed."""
        super().run(sockets)
        sink.drain()
        if self._service.has_failed:
            sys.exit(FAILURE)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note_error)
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # the model stays for good; each collection would scan it and hold up every stream
        settings = self._service.settings
        url = url_of(settings, self.config.port)
        log.info("ready", host=self.config.host, port=self.config.port, url=url, playground=settings.playground)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        self._service.tick()
        if self._renewal:
            self._renewal.tick()
        if self._service.has_failed and self._began_to_drain is None:
            log.error("the service has failed and stops")
            self._drain_seconds = FAILED_SECONDS
            self._begin_to_drain()
        if self._began_to_drain is not None and not self.should_exit:
            self._drain(time.monotonic() - self._began_to_drain)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        log.info("stopped")

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of a callback."""
        if isinstance(context.get("exception"), MemoryError):
            os._exit(FAILURE)
        loop.default_exception_handler(context)

    def _begin_to_drain(self) -> None:
        """From now on each answer closes its connection."""
        self._began_to_drain = time.monotonic()
        self.server_state.default_headers.append(CLOSE)
        self.config.encoded_headers.append(CLOSE)  # of which uvicorn makes the others anew every second
        self._service.admission.drain()

    def _drain(self, seconds: float) -> None:
        """Stop once no request is left and no connection may bring one, or when the time is over: those left fail."""
        num_present, connections = self._service.admission.num_present, self.server_state.connections
        if not self._is_logged:
            log.info("draining", choices=num_present, connections=len(connections), seconds=self._drain_seconds)
            self._is_logged = True
        if num_present == 0:
            self.should_exit = not connections or seconds > min(GOODBYE_SECONDS, self._drain_seconds)
        elif seconds > self._drain_seconds:
            log.warning("stopping with requests still running", choices=num_present)
            self._service.give_up()
            self.should_exit = True
