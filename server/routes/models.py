"""`GET /v1/models` and `/v1/models/{id}`: the served model under each of its names."""

from fastapi import APIRouter, Request

from server.generation.service import Service
from server.schemas.models import Model, ModelList

router = APIRouter()


@router.get("/v1/models", summary="The model under each of its names, with its exits and limits")
async def list_models(request: Request) -> ModelList:
    service: Service = request.app.state.service
    return ModelList(data=[service.card(name) for name in service.names])


@router.get("/v1/models/{model_id:path}", summary="The model under one name")
async def get_model(model_id: str, request: Request) -> Model | ModelList:
    """Return one model. `/v1/models/` lists all models."""
    service: Service = request.app.state.service
    return service.card(service.checked_model(model_id)) if model_id else await list_models(request)
