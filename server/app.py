"""The ASGI app for one model, and `run`, which serves it until SIGTERM or SIGINT."""

import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from fastapi import FastAPI
from prometheus_client import disable_created_metrics
from starlette.middleware import Middleware

from nvium_core import load_model
from nvium_core.text.renderer import RENDERER
from server.admission import Drainable, Loading
from server.errors import HANDLERS
from server.generation.service import Service
from server.http.access import EXPOSED, Cors, KeyGate, OriginCheck, RateLimit, read_keys
from server.http.bodies import Bodies, Guard
from server.http.middleware import AsGet, JsonBodies, LastResort, RequestContext, WhileServing
from server.http.server import STOP_SECONDS, DrainingServer, listen, uvicorn_config
from server.routes import openapi, playground, responses
from server.settings import Settings, read_settings
from server.telemetry.logs import configure_logs, logged_if_slow
from server.telemetry.metrics import Metrics
from server.telemetry.record import OTHER

log = structlog.get_logger("nvium.server")

ROUTES: list[Any] = [route for router in openapi.ROUTERS for route in router.routes]
ENDPOINTS = {
    route.path: route.path.removeprefix("/v1").strip("/").replace("/", "_")
    for route in ROUTES
    if "POST" in route.methods
}
"""Maps paths of POST requests to the endpoint's name in metrics and logs. All other requests are `OTHER`."""


def assemble(service: Service | Loading, gate: Middleware | None = None) -> FastAPI:
    """Create the app for a service. `gate` is the middleware that checks keys."""
    app = bare_app(lifespan, middleware(service.settings, service.metrics, gate))
    app.state.service = service
    app.state.response_store = responses.ResponseStore()
    service.metrics.create_series([*ENDPOINTS.values(), OTHER])
    for router in openapi.ROUTERS:
        app.include_router(router)
    if service.settings.playground:
        app.include_router(playground.router)
    return app


def create_app(**options: Any) -> FastAPI:
    """Load the model and return its app, for another ASGI server. Other settings come from `NVIUM_…` variables."""
    settings = read_settings(options)
    configure_logs(settings.log_level)
    return assemble(started(settings, Metrics(settings.latency_buckets)), keys_gate(settings))


def bare_app(lifespan: Callable[[FastAPI], Any], middleware: Iterable[Middleware]) -> FastAPI:
    return FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=list(middleware),
        exception_handlers=HANDLERS,
        # off, because FastAPI's telemetry would log exception messages and trace each request
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )


def middleware(settings: Settings, metrics: Metrics, gate: Middleware | None) -> Iterator[Middleware]:
    """Yield the middleware around the routes, outermost first."""
    yield Middleware(RequestContext, metrics=metrics, endpoints=ENDPOINTS, root_path=settings.root_path)
    yield Middleware(Guard, arrival_seconds=settings.arrival_seconds)
    if gate is None:
        yield Middleware(OriginCheck, settings=settings)
    if settings.cors_origins:
        yield Middleware(
            Cors,
            allow_origins=settings.cors_origins,
            allow_methods=sorted({"HEAD", *(method for route in ROUTES for method in route.methods)}),
            allow_headers=("*",),  # clients add their own
            allow_private_network=True,
            expose_headers=EXPOSED,
        )
    yield Middleware(LastResort)
    if gate:
        yield gate
    yield Middleware(WhileServing)
    if settings.requests_per_minute:
        yield Middleware(RateLimit, requests_per_minute=settings.requests_per_minute)
    yield Middleware(JsonBodies)
    yield Middleware(Bodies, max_bytes=settings.max_body_bytes, max_total_bytes=settings.max_present_bytes)
    yield Middleware(AsGet)


def keys_gate(settings: Settings) -> Middleware | None:
    """Return the middleware for the configured keys, if any. Raise `SettingsError` for an invalid key."""
    keys = read_keys(settings)
    return Middleware(KeyGate, keys=keys, metrics_open=settings.metrics_open) if keys else None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """At the end, stop the engine if the model was loaded."""
    try:
        yield
    finally:
        if isinstance(app.state.service, Service):
            app.state.service.worker.stop(STOP_SECONDS)  # blocks the event loop; no connection is left


def run(settings: Settings) -> None:
    """Listen, load the model, serve it until SIGTERM or SIGINT, then finish running requests.

    The caller configures the logs. Raise `CheckpointError`, `InvalidRequest`, `SettingsError` or `OSError` if the
    model, the settings or the address cannot be used. If the service fails, exit with code `FAILURE`, so that a
    supervisor restarts the process.
    """
    gate = keys_gate(settings)
    with listen(settings.host, settings.port) as listener:
        loading = Loading(settings)
        serve(assemble(loading, gate), listener, partial(started, settings, loading.metrics))


def serve(
    app: FastAPI,
    listener: socket.socket,
    load: Callable[[], Drainable] | None = None,
    server: type[DrainingServer] = DrainingServer,
    **options: Any,
) -> None:
    """Serve the app until SIGTERM or SIGINT. The result of `load` replaces its service. `options` are uvicorn's."""
    service: Drainable = app.state.service
    disable_created_metrics()
    server(uvicorn_config(app, service.settings, **options), service, load).run([listener])


def started(settings: Settings, metrics: Metrics) -> Service:
    """Load the model and start its engine. Raise as `run` does."""
    service = load(settings, metrics)
    service.start()
    return service


def load(settings: Settings, metrics: Metrics | None = None) -> Service:
    """Load the model and log its properties. Raise `CheckpointError` or `InvalidRequest` if it cannot be served."""
    started = time.monotonic()
    with logged_if_slow("loading", model=settings.model or "the bundled model"):
        loaded = load_model(
            settings.model, settings.device, settings.dtype, weights=settings.weights, exits=settings.exits
        )
        service = Service(loaded, settings, metrics)
    RENDERER.end_unused()
    log.info(
        "loaded",
        model=loaded.name,
        num_parameters=loaded.model.num_parameters(),
        **service.precision,
        device=str(loaded.model.device),
        seconds=round(time.monotonic() - started, 3),
    )
    service.log_capacity()
    return service
