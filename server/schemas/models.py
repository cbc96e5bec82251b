"""`GET /v1/models` and `/v1/models/{id}`."""

from typing import Any, Literal

from pydantic import BaseModel


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
