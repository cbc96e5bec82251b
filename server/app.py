"""The ASGI app for a model and settings, and `run`, which serves it until a signal stops it."""

import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from opentelemetry.trace import TracerProvider
from prometheus_client import disable_created_metrics
from starlette.middleware import Middleware

from nvium_core import LoadedModel, load_mapped
from server.errors import install_error_handlers
from server.generation.service import Service
from server.http.bodies import Bodies
from server.http.config import bounded_config
from server.http.cors import Cors
from server.http.drain import DrainingServer
from server.http.keys import KeyGate, KeyRing, read_keys
from server.http.listener import listen
from server.http.middleware import HeadAsGet, JsonBodies, LastResort, RequestFrame, UnderPath
from server.http.origins import OwnOrigin
from server.http.protection import Protection
from server.http.rate_limit import RateLimit
from server.http.renewal import Renewal
from server.http.room import room_for
from server.http.starting import answered_while_starting, starting_config
from server.http.tls import tls_context
from server.routes import chat, completions, health, models, openapi, playground, responses, tokens
from server.routes import metrics as metrics_page
from server.settings import Settings
from server.telemetry.logs import configure_logs
from server.telemetry.metrics import Metrics
from server.telemetry.tracing import Tracing, tracer_provider

log = structlog.get_logger("nvium.server")

ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat_completions",
    "/v1/responses": "responses",
    "/tokenize": "tokenize",
    "/v1/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/detokenize": "detokenize",
}
"""Endpoints whose requests are recorded, by path, with their names in metrics and logs."""

STOP_SECONDS = 5
"""Timeout for closing connections, and then for stopping the engine, once draining is over."""


def create_app(model: LoadedModel, settings: Settings) -> FastAPI:
    """Create the app for one model. Raises `InvalidRequest` or `SettingsError` for settings that do not fit it."""
    service, keys = Service(model, settings), KeyRing(read_keys(settings))
    return assemble(service, keys_gate(keys, settings, service.metrics), tracer_provider(settings))


def assemble(service: Service, gate: Middleware | None = None, provider: TracerProvider | None = None) -> FastAPI:
    """The app around a service, behind a gate, traced if there is a provider."""
    tracing = Tracing(provider, service.name) if provider else None
    app = bare_app(lifespan, layers(service.settings, service.metrics, gate, tracing))
    app.state.service = service
    app.state.kept_responses = responses.KeptResponses()
    service.metrics.foresee(ENDPOINTS.values())
    for routes in (completions, chat, responses, tokens, models, health, metrics_page, openapi):
        app.include_router(routes.router)
    if service.settings.playground:
        app.include_router(playground.router)
    return app


def bare_app(lifespan: Callable[[FastAPI], Any], middleware: Iterable[Middleware]) -> FastAPI:
    """An app without routes, with the error handlers."""
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=list(middleware),
        # FastAPI's own telemetry would repeat exception messages and trace each request twice
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    install_error_handlers(app)
    return app


def layers(
    settings: Settings, metrics: Metrics, gate: Middleware | None, tracing: Tracing | None = None
) -> Iterator[Middleware]:
    """The layers around the routes, outermost first."""
    if settings.root_path:
        yield Middleware(UnderPath, prefix=settings.root_path)
    yield Middleware(RequestFrame, metrics=metrics, endpoints=ENDPOINTS, tracing=tracing)
    yield Middleware(Protection)
    if gate is None:
        yield Middleware(OwnOrigin, settings=settings, metrics=metrics)
    if settings.cors_origins:
        yield Middleware(Cors, origins=settings.cors_origins)
    yield Middleware(LastResort)
    if gate:
        yield gate
    if settings.requests_per_minute:
        yield Middleware(RateLimit, requests_per_minute=settings.requests_per_minute, metrics=metrics)
    yield Middleware(JsonBodies, metrics=metrics)
    yield Middleware(
        Bodies,
        max_bytes=settings.max_body_bytes,
        max_bytes_present=settings.max_present_bytes,
        metrics=metrics,
    )
    yield Middleware(HeadAsGet)


def keys_gate(keys: KeyRing, settings: Settings, metrics: Metrics) -> Middleware | None:
    """The layer that requires a key, if there are any."""
    return Middleware(KeyGate, keys=keys, metrics=metrics, metrics_open=settings.metrics_open) if keys else None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Warm up if necessary, then run the engine as long as the app lives."""
    service: Service = app.state.service
    if not service.is_warm:
        service.warm_up()
    service.worker.start()
    try:
        yield
    finally:
        service.worker.stop(STOP_SECONDS)  # without a thread, which may be busy or gone; connections have ended


def run(settings: Settings) -> None:
    """Load the model and serve it until SIGTERM or SIGINT, then finish running requests.

    Raises `CheckpointError`, `InvalidRequest`, `SettingsError` or `OSError` for an unusable model, settings or address.
    Exits with code `FAILURE` once the service has failed, so that a supervisor restarts it.
    """
    configure_logs(settings.log_level)
    disable_created_metrics()
    keys, provider, tls = KeyRing(read_keys(settings)), tracer_provider(settings), tls_context(settings)
    (renewal := Renewal(settings, keys, tls)).listen()
    with listen(settings.host, settings.port) as listener:
        with answered_while_starting(listener, partial(starting_config, settings, tls)):
            service = load(settings)
            service.warm_up()
        app = assemble(service, keys_gate(keys, settings, service.metrics), provider)
        log.info("access", api_keys=len(keys), requests_per_minute=settings.requests_per_minute, tls=tls is not None)
        config = uvicorn_config(app, settings, tls, listener=listener, timeout_graceful_shutdown=STOP_SECONDS)
        DrainingServer(config, service, renewal).run(sockets=[listener])


def load(settings: Settings) -> Service:
    """Load the model, and log that. Raises `CheckpointError` or `InvalidRequest`."""
    say = log.info if sys.stderr.isatty() else log.debug  # a terminal's user waits for it
    say("loading", model=settings.model or "the bundled model")
    started = time.monotonic()
    loaded = load_mapped(settings.model, settings.device, settings.dtype, settings.weights, settings.exits)
    service = Service(loaded, settings)
    log.info(
        "loaded",
        model=loaded.name,
        num_parameters=loaded.model.num_parameters(),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(loaded.model.device),
        seconds=round(time.monotonic() - started, 3),
    )
    service.introduce()
    return service


def uvicorn_config(
    app: FastAPI, settings: Settings, tls: ssl.SSLContext | None, *, descriptors_each: int = 1, **more: Any
) -> uvicorn.Config:
    """uvicorn's configuration. Raises `SettingsError` if the limit of open files allows no connection.

    `descriptors_each` is how many file descriptors a connection takes.
    """
    room = room_for(settings.max_connections, descriptors_each)
    if room.num_connections < settings.max_connections:
        log.warning("the limit of open files bounds connections", allowed=room.num_connections)
    return bounded_config(app, settings, tls, room, app.state.service.metrics, **more)
