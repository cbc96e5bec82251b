"""A uvicorn server that finishes running requests before it stops."""

import gc
import socket
import time
from types import FrameType
from typing import Protocol

import structlog
import uvicorn

from server.http.admission import Admission
from server.http.connection import Connection
from server.http.renewal import Renewal
from server.settings import Settings

ANY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (it is not listened on here)

log = structlog.get_logger("nvium.server")

FAILED_SECONDS = 5
"""For answering open requests once the service has failed."""

FIRST_REQUEST_SECONDS = 2
"""How long the first request of a connection may still come, to be told that the server drains. Closing the connection
before would lose a request that is on its way."""


def url_of(settings: Settings, port: int) -> str:
    """The server's URL on this machine."""
    if settings.uds:
        return f"unix:{settings.uds}:{settings.root_path}"
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


class DrainingServer(uvicorn.Server):
    """The first signal drains, the second stops at once; the exit code is 0 either way.

    A service that has failed drains too, but only briefly, as nothing can be computed any more.
    """

    def __init__(self, config: uvicorn.Config, service: Drainable, renewal: Renewal | None = None) -> None:
        super().__init__(config)
        self._renewal = renewal
        self._service = service
        self._drains_until: float | None = None
        self._awaits_until = 0.0
        self._is_logged = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drains_until is not None:
            self.should_exit = self.force_exit = True
            return
        self._begin_to_drain(self._service.settings.drain_seconds)

    def _begin_to_drain(self, seconds: float) -> None:
        now = time.monotonic()
        self._drains_until, self._awaits_until = now + seconds, now + min(seconds, FIRST_REQUEST_SECONDS)
        self._service.admission.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._renewal:
            self._renewal.listen()
        gc.collect()
        gc.freeze()  # the model stays for good; each collection would scan it and hold up every stream
        settings = self._service.settings
        url = url_of(settings, self.config.port)
        log.info("ready", host=self.config.host, port=self.config.port, url=url, playground=settings.playground)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        self._service.tick()
        if self._service.has_failed and self._drains_until is None:
            log.error("the service has failed and stops")
            self._begin_to_drain(FAILED_SECONDS)
        if self._drains_until is not None and not self.should_exit:
            self._drain()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        log.info("stopped", at_once=self.force_exit)

    def _drain(self) -> None:
        """Stop once no request is left, or when the time is over: remaining requests fail."""
        num_present = self._service.admission.num_present
        assert self._drains_until is not None
        if not self._is_logged:
            log.info("draining", choices=num_present, seconds=self._service.settings.drain_seconds)
            self._is_logged = True
        if num_present == 0:
            self.should_exit = not self._awaits_first_requests()
        elif time.monotonic() > self._drains_until:
            log.warning("stopping with requests still running", choices=num_present)
            self._service.give_up()
            self.should_exit = True

    def _awaits_first_requests(self) -> bool:
        connections = [each for each in self.server_state.connections if isinstance(each, Connection)]
        return time.monotonic() < self._awaits_until and any(each.awaits_first_request for each in connections)
