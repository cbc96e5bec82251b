"""Answers while the model loads: probes, and 503 to everything else."""

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.errors import Overloaded
from server.http.config import bounded_config
from server.http.listener import Listener
from server.http.room import room_for
from server.settings import Settings
from server.telemetry.metrics import Metrics

RETRY_SECONDS = 2
STOP_SECONDS = 1
"""Timeout for closing connections once the model is loaded."""


async def starting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """The app while the model loads: live but not ready. It closes connections, so that the next request reaches the
    server itself."""
    response = JSONResponse({"status": "ok"}) if scope["path"].endswith("/livez") else not_ready().response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def not_ready() -> Overloaded:
    return Overloaded("the model is loading", code="not_ready", retry_after_seconds=RETRY_SECONDS)


def starting_config(settings: Settings, tls: ssl.SSLContext | None, listener: Listener) -> uvicorn.Config:
    """Connections are bounded as later; metrics begin with the model."""
    room = room_for(settings.max_connections)
    more = {"lifespan": "off", "timeout_graceful_shutdown": STOP_SECONDS}
    return bounded_config(starting_app, settings, tls, room, Metrics(()), listener=listener, **more)


@contextmanager
def answered_while_starting(listener: socket.socket, configure: Callable[[Listener], uvicorn.Config]) -> Iterator[None]:
    """Answer from a thread, on a duplicate of the socket; connections still waiting are left to the server."""
    duplicate = Listener(socket.socket(fileno=os.dup(listener.fileno())))
    server = uvicorn.Server(configure(duplicate))
    thread = threading.Thread(target=server.run, args=[[duplicate]], name="nvium-starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
