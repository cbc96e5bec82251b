"""uvicorn with our configuration and listening socket. It finishes running requests before it stops."""

import asyncio
import gc
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from errno import EADDRINUSE
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from server.admission import Drainable
from server.http.connections import NUM_CLOSING, Connections
from server.settings import Settings, SettingsError
from server.telemetry.logs import sink
from server.thread_pool import DaemonThreadPool

STOP_SECONDS = 5
"""Timeout for each of the two steps after draining: closing the connections and stopping the engine."""

NO_PASSWORD = "none"  # noqa: S105 (not a secret)
"""Makes OpenSSL refuse an encrypted key. Without it, OpenSSL would ask for the password on the terminal."""

BACKLOG = 2048  # length of the accept queue

ACCEPTS_PER_TURN = 4
"""Connections accepted per turn of the event loop. Few, because closing others to make room takes some turns."""

RESERVE = 128  # descriptors reserved for files, pipes to helpers, and connections that are about to be closed

ANY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (the server does not listen here)

log = structlog.get_logger("nvium.server")

FAILED_SECONDS = 5  # timeout for answering open requests after the service has failed

IDLE_SECONDS = 2
"""How long idle connections stay open while draining. A request sent in this time gets a 503 instead of a reset."""

FAILURE = 1  # exit code if the service has failed


def uvicorn_config(
    app: FastAPI, settings: Settings, *, descriptors_per_connection: int = 1, **more: Any
) -> uvicorn.Config:
    """Configure uvicorn with a limit on connections, and load the certificate.

    Raise `SettingsError` if the certificate cannot be used, or the limit of open files leaves no room for connections.
    """
    max_connections = connection_limit(settings.max_connections, descriptors_per_connection)
    if max_connections < settings.max_connections:
        log.warning("connections reduced to fit the limit of open files", allowed=max_connections)
    connections: Any = Connections(max_connections, settings, app.state.service.metrics)
    config = uvicorn.Config(
        app,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=NO_PASSWORD,
        ssl_ciphers=None,  # Python's own list; older versions of uvicorn have another
        http=connections,
        loop="asyncio",  # do not use uvloop, even if it is installed
        ws="none",
        host=settings.host,
        log_config=None,
        log_level="error",  # a client can cause any number of uvicorn's warnings
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.http_keep_alive_seconds,  # type: ignore[arg-type]  # a fraction works too
        limit_concurrency=max_connections + NUM_CLOSING,
        backlog=ACCEPTS_PER_TURN,
        timeout_graceful_shutdown=STOP_SECONDS,
        **more,
    )

    if config.ssl_keyfile and not config.ssl_certfile:
        raise SettingsError("ssl_keyfile: requires ssl_certfile")
    try:
        config.load()
    except OSError as error:  # `ssl.SSLError` is an `OSError`
        reason = (error.reason or "not PEM, or encrypted") if isinstance(error, ssl.SSLError) else error.strerror
        files = " and ".join(str(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file)
        raise SettingsError(f"ssl_certfile: {files} cannot be used: {reason}") from error
    return config


def connection_limit(max_connections: int, descriptors_per_connection: int = 1) -> int:
    """Raise the limit of open files. Return `max_connections`, or as many as fit. Raise `SettingsError` if none do."""
    max_files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems refuse even the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        max_files = hard
    if max_files == resource.RLIM_INFINITY:
        return max_connections
    if (possible := (max_files - RESERVE) // descriptors_per_connection) < 1:
        raise SettingsError(f"max_connections: a limit of {max_files} open files leaves no room for connections")
    return min(max_connections, possible)


class Listener(socket.socket):
    """Ignores the length of the queue that asyncio asks for, which is also its number of accepts per turn.

    asyncio would accept a whole burst in one turn. The burst could use up all descriptors before others are closed,
    and asyncio would then accept nothing for a second.
    """

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)


def listen(host: str, port: int) -> Listener:
    """Open a listening socket. Raise `OSError` with the address if that fails.

    Set TCP_NODELAY, which asyncio sets only on sockets that it opens itself. Without TCP_NODELAY, the first token waits
    40 ms for the client to acknowledge the status line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return Listener(fileno=listener.detach())
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while attempting")[0]
        advice = "; choose another --port" if error.errno == EADDRINUSE else ""
        raise OSError(f"cannot listen on {host}:{port}: {reason}{advice}") from error


class DrainingServer(uvicorn.Server):
    """Says goodbye and drains at the first signal, and fails open requests at the second. The exit code is 0.

    For `--goodbye-seconds`, the readiness probe fails and requests are accepted, so that load balancers can react.

    If the service fails, the server drains for `FAILED_SECONDS` and exits with `FAILURE`. If a callback of the event
    loop raises `MemoryError`, the process exits at once.

    load: called on another thread. Its result replaces `service` here and in the app. Its errors end the server.
    """

    def __init__(self, config: uvicorn.Config, service: Drainable, load: Callable[[], Drainable] | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._leaves_at: float | None = None
        """When the server begins to drain. None before the first signal."""
        self._drain_seconds: float = service.settings.drain_seconds
        self._loading = DaemonThreadPool(1, "nvium-load").submit(load) if load else None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note when to leave. A signal may interrupt anything, so the next tick does the rest."""
        now = time.monotonic()
        if self._leaves_at is None:
            self._leaves_at = now + (0 if self._loading else self._service.settings.goodbye_seconds)
        else:
            self._leaves_at, self._drain_seconds = now, 0

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        sink.drain()
        if error := self._loading_error:
            raise error
        if self._loading:
            os._exit(0)  # the thread cannot be stopped
        if self._service.has_failed:
            sys.exit(FAILURE)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note_error)
        await super().startup(sockets)
        if self._loading:
            asyncio.wrap_future(self._loading).add_done_callback(self._arrive)
        else:
            self._begin()

    def _begin(self) -> None:
        gc.freeze()  # garbage collection must not scan the model: that would pause all streams
        gc.enable()
        self.announce()

    def announce(self) -> None:
        settings = self._service.settings
        port = self.servers[0].sockets[0].getsockname()[1]
        scheme, host = "https" if settings.ssl_certfile else "http", ANY_INTERFACE.get(settings.host, settings.host)
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"
        log.info("ready", host=settings.host, port=port, url=url, playground=settings.playground)

    async def on_tick(self, counter: int) -> bool:
        if self._loading_error:
            return True
        self._service.tick()
        if self._service.has_failed and not self._service.admission.is_draining:
            log.error("the service has failed, stopping")
            self._leaves_at, self._drain_seconds = time.monotonic(), FAILED_SECONDS
        if self._leaves_at is not None and not self.should_exit:
            self._drain(time.monotonic() - self._leaves_at)
        return await super().on_tick(counter)

    def _arrive(self, loaded: asyncio.Future[Drainable]) -> None:
        """Serve the loaded service, unless it failed to load or the server is leaving."""
        if not loaded.exception() and self._leaves_at is None:
            app: Any = self.config.app
            self._service = app.state.service = loaded.result()
            self._loading = None
            self._begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if not self._loading_error:
            log.info("stopped")

    @property
    def _loading_error(self) -> BaseException | None:
        return self._loading.exception() if self._loading and self._loading.done() else None

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), MemoryError):
            os._exit(FAILURE)
        loop.default_exception_handler(context)

    def _drain(self, seconds: float) -> None:
        """Fail the readiness probe. Then refuse requests, and stop once all requests and connections have ended.

        After `_drain_seconds`, fail open requests and stop. Negative `seconds` are left until the drain begins. `Guard`
        closes each connection after its response.
        """
        admission, connections = self._service.admission, self.server_state.connections
        if seconds < 0 and not admission.is_leaving:
            log.info("saying goodbye", seconds=self._service.settings.goodbye_seconds)
        admission.is_leaving = True
        if seconds < 0:
            return
        num_present = admission.num_present
        if not admission.is_draining:
            log.info("draining", choices=num_present, connections=len(connections), seconds=self._drain_seconds)
        admission.is_draining = True
        if num_present == 0:
            self.should_exit = not connections or seconds > min(IDLE_SECONDS, self._drain_seconds)
        elif seconds > self._drain_seconds:
            log.warning("stopping before all requests have finished", choices=num_present)
            self._service.give_up()
            self.should_exit = True
