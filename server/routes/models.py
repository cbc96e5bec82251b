"""`GET /v1/models` and `/v1/models/{id}`: the served model under each of its names."""

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from server.generation.service import Service

NEUTRAL = {"temperature": 1.0, "top_p": 1.0}
LIMITS = ("max_n", "max_prompts", "max_new_tokens", "max_queue", "max_body_bytes")

router = APIRouter()


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


@router.get("/v1/models", summary="The model under each of its names, with its exits and limits")
async def list_models(request: Request) -> ModelList:
    service: Service = request.app.state.service
    return ModelList(data=[card(service, name) for name in service.names])


@router.get("/v1/models/{model_id:path}", summary="The model under one name")
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
