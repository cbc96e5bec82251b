"""uvicorn's configuration."""

import ssl
from functools import partial
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from server.http.connection import Connection
from server.http.connection_limit import connection_limit
from server.http.listener import BACKLOG
from server.http.unread import UnreadBytes
from server.settings import Settings, SettingsError

log = structlog.get_logger("nvium.server")

STOP_SECONDS = 5
"""Timeout for each of the two steps after draining: closing the connections and stopping the engine."""

NO_PASSWORD = "none"  # noqa: S105 (not a secret)
"""Makes OpenSSL refuse an encrypted key. Without it, OpenSSL would ask for the password on the terminal."""

UNREAD_RATIO = 8  # the limit on unread bytes of responses, as a multiple of `--max-present-bytes`


def uvicorn_config(
    app: FastAPI,
    settings: Settings,
    *,
    descriptors_per_connection: int = 1,
    **more: Any,
) -> uvicorn.Config:
    """Configure uvicorn with a limit on connections, and load the certificate.

    Raise `SettingsError` if the certificate cannot be used, or the limit of open files leaves no room for connections.
    """
    limit = connection_limit(settings.max_connections, descriptors_per_connection)
    if limit.num_connections < settings.max_connections:
        log.warning("connections reduced to fit the limit of open files", allowed=limit.num_connections)
    connection: Any = partial(
        Connection,
        arrival_seconds=settings.arrival_seconds,
        slow_client_seconds=settings.slow_client_seconds,
        limit=limit,
        metrics=app.state.service.metrics,
        unread=UnreadBytes(UNREAD_RATIO * settings.max_present_bytes),
    )
    config = uvicorn.Config(
        app,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=NO_PASSWORD,
        ssl_ciphers=None,  # Python's own list; older versions of uvicorn have another
        http=connection,
        loop="asyncio",  # do not use uvloop, even if it is installed
        ws="none",
        host=settings.host,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.http_keep_alive_seconds,  # type: ignore[arg-type]  # a fraction works too
        backlog=min(BACKLOG, limit.num_connections),
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
