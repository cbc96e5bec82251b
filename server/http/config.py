"""uvicorn's configuration, and the listening socket."""

import resource
import socket
import ssl
from contextlib import suppress
from errno import EADDRINUSE
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from server.http.connections import NUM_CLOSING, Connections
from server.settings import Settings, SettingsError

log = structlog.get_logger("nvium.server")

STOP_SECONDS = 5
"""Timeout for each of the two steps after draining: closing the connections and stopping the engine."""

NO_PASSWORD = "none"  # noqa: S105 (not a secret)
"""Makes OpenSSL refuse an encrypted key. Without it, OpenSSL would ask for the password on the terminal."""

BACKLOG = 2048  # length of the accept queue

ACCEPTS_PER_TURN = 4
"""Connections accepted per turn of the event loop. Few, because closing others to make room takes some turns."""

RESERVE = 128  # descriptors reserved for files, pipes to helpers, and connections that are about to be closed


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
    load_certificate(config)
    return config


def load_certificate(config: uvicorn.Config) -> None:
    if config.ssl_keyfile and not config.ssl_certfile:
        raise SettingsError("ssl_keyfile: requires ssl_certfile")
    try:
        config.load()
    except OSError as error:  # `ssl.SSLError` is an `OSError`
        reason = (error.reason or "not PEM, or encrypted") if isinstance(error, ssl.SSLError) else error.strerror
        files = " and ".join(str(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file)
        raise SettingsError(f"ssl_certfile: {files} cannot be used: {reason}") from error


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
