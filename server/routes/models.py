"""`GET /v1/models` and `/v1/models/{id}`: the one model served."""

from fastapi import APIRouter, Request

from server.schemas.models import Model, ModelList

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    return ModelList(data=[request.app.state.service.card()])


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, request: Request) -> Model:
    service = request.app.state.service
    service.check_model(model_id)
    card: Model = service.card()
    return card
