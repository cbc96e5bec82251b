"""Probes (`/livez`, `/readyz`, `/health`), `/metrics` and `/version`."""

from importlib.metadata import version

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from server.errors import ApiError
from server.generation.service import Service

router = APIRouter()


@router.get("/livez", summary="Liveness probe: the engine makes progress")
async def livez(request: Request) -> dict[str, str]:
    check_live(request.app.state.service)
    return {"status": "ok"}


@router.get("/readyz", summary="Readiness probe: the server accepts requests")
async def readyz(request: Request) -> dict[str, str]:
    check_ready(request.app.state.service)
    return {"status": "ok"}


@router.get("/health", summary="Both probes in one")
async def health(request: Request) -> dict[str, str]:
    check_live(request.app.state.service)
    check_ready(request.app.state.service)
    return {"status": "ok"}


@router.get(
    "/metrics", summary="Metrics for Prometheus. `--metrics-open` makes them public", response_class=PlainTextResponse
)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", summary="The version of nvium")
async def served_version() -> dict[str, str]:
    return {"version": version("nvium")}


def check_live(service: Service) -> None:
    if not service.is_live:
        raise ApiError("the device thread or a worker thread makes no progress", status=503, code="not_live")


def check_ready(service: Service) -> None:
    if not service.is_ready:
        raise ApiError("the server is starting or shutting down", status=503, code="not_ready")
