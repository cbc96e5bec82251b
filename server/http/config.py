"""uvicorn's configuration."""

import ssl
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from server.http.connection import Connection
from server.http.handshakes import Handshakes
from server.http.listener import BACKLOG, Listener
from server.http.room import Room
from server.settings import Settings
from server.telemetry.metrics import Metrics


def bounded_config(
    app: ASGIApp,
    settings: Settings,
    tls: ssl.SSLContext | None,
    room: Room,
    metrics: Metrics,
    *,
    listener: Listener | None = None,
    **more: Any,
) -> uvicorn.Config:
    """Configure uvicorn for the connections in `room`. With TLS, bound the listener's unfinished handshakes too."""
    if listener:
        more["port"] = listener.getsockname()[1]
        if tls:
            listener.handshakes = Handshakes(room.num_connections + 2 * room.num_excess)
    connection: Any = partial(
        Connection,
        arrival_seconds=settings.arrival_seconds,
        slow_client_seconds=settings.slow_client_seconds,
        room=room,
        metrics=metrics,
        handshakes=listener.handshakes if listener else None,
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
        timeout_keep_alive=settings.http_keep_alive_seconds,  # type: ignore[arg-type]  # may be a fraction
        backlog=min(BACKLOG, room.num_connections),
        **more,
    )
