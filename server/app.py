"""The application: model and settings in, an ASGI app out; and `run`, which serves it until told to stop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import disable_created_metrics

from nvium_core import LoadedModel, load_model
from server.connection import Connection
from server.drain import DrainingServer
from server.errors import install_error_handlers
from server.logs import configure_logs
from server.middleware import BodyLimit, JsonBodies, RequestFrame
from server.routes import completions, health, metrics, models
from server.service import Service
from server.settings import Settings

ENDPOINTS = {"/v1/completions": "completions"}
"""Paths whose requests are recorded, and their names in metrics and logs."""

BACKLOG = 2048
"""Connections that may wait to be accepted."""

STOP_SECONDS = 5
"""How long ending connections, and then the device thread, may take once nothing is waited for any more."""


def create_app(model: LoadedModel, settings: Settings) -> FastAPI:
    """The app for one model. Raises `InvalidRequest` for settings that the model cannot be run with."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.service = service = Service(model, settings)
    install_error_handlers(app)
    app.add_middleware(JsonBodies)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(RequestFrame, metrics=service.metrics, endpoints=ENDPOINTS)
    for routes in (completions, models, health, metrics):
        app.include_router(routes.router)
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Warm up, then run the device thread for as long as the app lives."""
    service: Service = app.state.service
    service.warm_up()
    service.worker.start()
    try:
        yield
    finally:
        await asyncio.to_thread(service.worker.stop, STOP_SECONDS)


def run(settings: Settings) -> None:
    """Load the model and serve it until SIGTERM or SIGINT, then let running requests finish.

    Raises `CheckpointError`, `InvalidRequest` or `OSError` for a model, settings or an address that cannot be used.
    """
    configure_logs()
    disable_created_metrics()
    with listen(settings.host, settings.port) as listener:
        app = create_app(load_model(settings.model, settings.device, settings.dtype), settings)
        app.state.service.introduce()
        config = uvicorn_config(app, settings, port=listener.getsockname()[1], timeout_graceful_shutdown=STOP_SECONDS)
        DrainingServer(config, app.state.service).run(sockets=[listener])


def uvicorn_config(app: FastAPI, settings: Settings, **more: Any) -> uvicorn.Config:
    """How connections are served, wherever they come from."""
    connection: Any = partial(
        Connection, arrival_seconds=settings.arrival_seconds, slow_client_seconds=settings.slow_client_seconds
    )
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        host=settings.host,
        log_config=None,
        access_log=False,
        server_header=False,
        **more,
    )


def listen(host: str, port: int) -> socket.socket:
    """The socket to serve on, taken before the model is loaded. Raises `OSError` naming the address.

    Connections send small pieces at once, which asyncio sees to only for sockets that it opens itself: without, the
    first token would wait 40 ms for the client to acknowledge the status line.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
