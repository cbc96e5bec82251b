"""Probes (`/livez`, `/readyz`, `/health`), `/metrics` and `/version`."""

from importlib.metadata import version

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

OK = {"status": "ok"}

router = APIRouter()


@router.get("/livez", summary="Liveness probe: the engine makes progress")
async def livez(request: Request) -> dict[str, str]:
    request.app.state.service.check_live()
    return OK


@router.get("/readyz", summary="Readiness probe: the server accepts requests")
async def readyz(request: Request) -> dict[str, str]:
    await request.app.state.service.check_ready()
    return OK


@router.get("/health", summary="Both probes in one")
async def health(request: Request) -> dict[str, str]:
    await livez(request)
    return await readyz(request)


@router.get(
    "/metrics", summary="Metrics for Prometheus. `--metrics-open` makes them public", response_class=PlainTextResponse
)
async def metrics(request: Request) -> Response:
    return Response(await request.app.state.service.metrics_page(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", summary="The version of nvium")
async def served_version() -> dict[str, str]:
    return {"version": version("nvium")}
