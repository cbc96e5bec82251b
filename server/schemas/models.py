"""`GET /v1/models` and `/v1/models/{id}`."""

from typing import Any, Literal

from server.schemas.body import ResponseBody


class Model(ResponseBody):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nvium"
    max_model_len: int
    limits: dict[str, int]
    nvium: dict[str, Any]


class ModelList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[Model]
