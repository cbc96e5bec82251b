"""uvicorn's configuration."""

import ssl
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from server.http.connection import Connection
from server.http.connection_limit import ConnectionLimit
from server.http.handshakes import Handshakes
from server.http.listener import BACKLOG, Listener
from server.http.unread import UnreadBytes
from server.settings import Settings
from server.telemetry.metrics import Metrics

UNREAD_RATIO = 8
"""The limit on unread bytes of responses, as a multiple of `--max-present-bytes`."""


def bounded_config(
    app: ASGIApp,
    settings: Settings,
    tls: ssl.SSLContext | None,
    limit: ConnectionLimit,
    metrics: Metrics,
    *,
    listener: Listener | None = None,
    **more: Any,
) -> uvicorn.Config:
    """Configure uvicorn with a limit on connections. With TLS, also limit the listener's unfinished handshakes."""
    if listener:
        more["port"] = listener.getsockname()[1]
        if tls:
            listener.handshakes = Handshakes(limit.num_connections + 2 * limit.num_excess)
    connection: Any = partial(
        Connection,
        arrival_seconds=settings.arrival_seconds,
        slow_client_seconds=settings.slow_client_seconds,
        limit=limit,
        metrics=metrics,
        handshakes=listener.handshakes if listener else None,
        unread=UnreadBytes(UNREAD_RATIO * settings.max_present_bytes),
    )
    return uvicorn.Config(
        app,
        ssl_context_factory=(lambda *_: tls) if tls else None,
        http=connection,
        loop="asyncio",  # do not use uvloop, even if it is installed
        ws="none",
        host=settings.host,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.http_keep_alive_seconds,  # type: ignore[arg-type]  # a fraction works too
        backlog=min(BACKLOG, limit.num_connections),
        **more,
    )
