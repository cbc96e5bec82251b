"""`GET /openapi.json`: describes every route except the playground's, as FastAPI finds them."""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from server.routes import completions, responses, status, tokens
from server.schemas.chat import ChatChunk
from server.schemas.completions import Completion
from server.schemas.responses import ResponseEvent

Json = dict[str, Any]

router = APIRouter()

ROUTERS = [completions.router, responses.router, tokens.router, status.models, status.router, router]

STREAMS = {
    "post /v1/completions": Completion,
    "post /v1/chat/completions": ChatChunk,
    "post /v1/responses": ResponseEvent,
    "get /v1/responses/{response_id}": ResponseEvent,
}
"""Endpoints whose responses may be streams, with the type of an event's data."""

REF = "#/components/schemas/{model}"


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorDetails


ERROR = {"$ref": REF.format(model=Error.__name__)}
FAILED = {"content": {"application/json": {"schema": ERROR}}}
FAILURES: dict[int | str, Json] = {
    "4XX": {"description": "Client error", **FAILED},
    "5XX": {"description": "Server error", **FAILED},
}


@router.get("/openapi.json", summary="This API as an OpenAPI 3.1 document")
async def openapi(request: Request) -> Json:
    service = request.app.state.service
    described, root_path = with_defaults(document(), service.sampling_defaults), service.settings.root_path
    return {**described, "servers": [{"url": root_path}]} if root_path else described


def with_defaults(described: Json, defaults: Mapping[str, Any]) -> Json:
    """Replace the defaults of sampling parameters by the served model's own."""
    described = deepcopy(described)
    for schema in described["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if name in defaults and "default" in field:
                field["default"] = defaults[name]
    return described


@cache
def document() -> Json:
    """Return FastAPI's description, with error responses and streams."""
    api = APIRouter()
    for each in ROUTERS:
        api.include_router(each, responses=FAILURES)
    with warnings.catch_warnings(action="ignore"):  # one route has two methods
        described = get_openapi(title="nvium", version="1", routes=api.routes)
    _, definitions = TypeAdapter.json_schemas(
        [(kind, "serialization", TypeAdapter[Any](kind)) for kind in (Error, *STREAMS.values())], ref_template=REF
    )
    described["components"]["schemas"] |= definitions["$defs"]
    for path, methods in described["paths"].items():
        described["paths"][path] = dict(sorted(methods.items(), reverse=True))  # a route's methods are a set
        for method, operation in methods.items():
            del operation["operationId"]
            if stream := STREAMS.get(f"{method} {path}"):
                schema = event({"$ref": REF.format(model=stream.__name__)})
                operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": schema}
    return described


def event(data: Json) -> Json:
    content = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [data, ERROR]}}
    text = {"type": "string", "anyOf": [{"const": "[DONE]"}, content]}
    return {"type": "object", "properties": {"data": text}, "required": ["data"]}
