"""Answers while the model loads: probes, and 503 to everything else."""

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.errors import Overloaded

RETRY_SECONDS = 2


async def starting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Live but not ready. Closes connections, so that the next request reaches the server itself."""
    response = JSONResponse({"status": "ok"}) if scope["path"].endswith("/livez") else not_ready().response()
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def not_ready() -> Overloaded:
    return Overloaded("the model is loading", code="not_ready", retry_after_seconds=RETRY_SECONDS)


@contextmanager
def answered_while_starting(listener: socket.socket, tls: ssl.SSLContext | None) -> Iterator[None]:
    """Answer from a thread, on a duplicate of the socket; connections still waiting are left to the server."""
    config = uvicorn.Config(
        starting_app,
        ssl_context_factory=(lambda *_: tls) if tls else None,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server, duplicate = uvicorn.Server(config), socket.socket(fileno=os.dup(listener.fileno()))
    thread = threading.Thread(target=server.run, args=[[duplicate]], name="nvium-starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
