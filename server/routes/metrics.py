"""`GET /metrics` for Prometheus."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

router = APIRouter()


@router.get(
    "/metrics",
    summary="Metrics for Prometheus. `--metrics-open` makes them public",
    response_class=PlainTextResponse,
)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})
