"""`GET /metrics` for Prometheus."""

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(request.app.state.service.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})
