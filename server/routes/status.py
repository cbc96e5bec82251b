"""Probes (`/livez`, `/readyz`, `/health`), `/metrics`, `/version`, and the served model under each of its names."""

from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from server.generation.service import Service

OK = {"status": "ok"}

NEUTRAL = {"temperature": 1.0, "top_p": 1.0}
LIMITS = ("max_n", "max_prompts", "max_new_tokens", "max_queue", "max_body_bytes")

router = APIRouter()
models = APIRouter()
"""The routes that a gateway forwards to a replica."""


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


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nvium"
    max_model_len: int
    limits: dict[str, int]
    nvium: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@models.get("/v1/models", summary="The model under each of its names, with its exits and limits")
async def list_models(request: Request) -> ModelList:
    service: Service = request.app.state.service
    return ModelList(data=[card(service, name) for name in service.names])


@models.get("/v1/models/{model_id:path}", summary="The model under one name")
async def get_model(model_id: str, request: Request) -> Model | ModelList:
    """Return one model. `/v1/models/` lists all models."""
    service: Service = request.app.state.service
    return card(service, service.checked_model(model_id)) if model_id else await list_models(request)


def card(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.created,
        max_model_len=service.engine.context,
        limits={name: getattr(service.settings, name) for name in LIMITS},
        nvium={
            "exit_layers": service.exit_layers,
            "num_layers": service.num_layers,
            "num_loops": service.num_loops,
            **service.precision,
            "processor": service.engine.runner.processor,
            "eager_passes": service.worker.state.eager_passes,
            "suggested": NEUTRAL | service.sampling_defaults,
        },
    )
