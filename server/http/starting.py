"""A server that runs while the model loads. It answers 200 to `/livez`, and 503 to all other requests."""

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.errors import ApiError
from server.http.config import bounded_config
from server.http.connection_limit import connection_limit
from server.http.listener import Listener
from server.settings import Settings
from server.telemetry.metrics import Metrics

RETRY_SECONDS = 2
STOP_SECONDS = 1
"""Timeout for closing connections once the model is loaded."""


async def starting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as a live server that is not ready. Close the connection, so that the next one reaches the real server."""
    retry = {"retry-after": str(RETRY_SECONDS)}
    loading = ApiError("the model is loading", status=503, code="not_ready", headers=retry)
    response = JSONResponse({"status": "ok"}) if scope["path"].endswith("/livez") else loading.response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)


@contextmanager
def starting_server(listener: socket.socket, settings: Settings, tls: ssl.SSLContext | None = None) -> Iterator[None]:
    """Run the starting server in a thread, on a duplicate of the socket, while the context is open.

    The starting server has the real server's limits. Its metrics are discarded.
    """
    duplicate = Listener(socket.socket(fileno=os.dup(listener.fileno())))
    more = {"lifespan": "off", "timeout_graceful_shutdown": STOP_SECONDS}
    limit = connection_limit(settings.max_connections)
    config = bounded_config(starting_app, settings, tls, limit, Metrics(()), listener=duplicate, **more)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=[[duplicate]], name="nvium-starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
