"""`GET /openapi.json`: describes every route except the playground's, with the route's request and responses.

A test compares `ROUTES` with the app's routes.
"""

import re
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from server.schemas.body import RequestBody, ResponseBody
from server.schemas.chat import Chat, ChatChunk, ChatRequest
from server.schemas.completions import Completion, CompletionRequest
from server.schemas.models import Model, ModelList
from server.schemas.responses import DeletedResponse, Response, ResponseEvent, ResponseRequest
from server.schemas.tokens import Detokenized, DetokenizeRequest, TokenizeRequest, TokenizerInfo, Tokens

Json = dict[str, Any]

router = APIRouter()

REF = "#/components/schemas/{model}"

PROBE_ERRORS = (400, 405, 408, 500, 503)
ERRORS = (400, 401, 405, 408, 429, 500)
"""Status codes of all routes except probes."""

POST_ERRORS = (*ERRORS, 404, 413, 503)


class ErrorDetails(ResponseBody):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(ResponseBody):
    error: ErrorDetails


class Status(ResponseBody):
    status: Literal["ok"]


class Version(ResponseBody):
    version: str


@dataclass(frozen=True)
class Route:
    """A route. `answer` is the response's type, or None for plain text. `chunk` is the type of a stream's events."""

    method: str
    path: str
    summary: str
    answer: Any
    request: type[RequestBody] | None = None
    chunk: type | None = None
    errors: tuple[int, ...] = ERRORS


RESPONSES = "Generate a response (OpenAI's Responses API)"

ROUTES = (
    Route("post", "/v1/completions", "Continue prompts", Completion, CompletionRequest, Completion, POST_ERRORS),
    Route("post", "/v1/chat/completions", "Answer messages", Chat, ChatRequest, ChatChunk, POST_ERRORS),
    Route("post", "/v1/responses", RESPONSES, Response, ResponseRequest, ResponseEvent, POST_ERRORS),
    Route("get", "/v1/responses/{response_id}", "Get a stored response", Response, errors=(*ERRORS, 404)),
    Route("delete", "/v1/responses/{response_id}", "Delete a stored response", DeletedResponse, errors=(*ERRORS, 404)),
    Route("post", "/tokenize", "Tokenize a text or a chat", Tokens, TokenizeRequest, None, POST_ERRORS),
    Route("post", "/v1/tokenize", "Tokenize a text or a chat", Tokens, TokenizeRequest, None, POST_ERRORS),
    Route("post", "/detokenize", "Convert token ids to text", Detokenized, DetokenizeRequest, None, POST_ERRORS),
    Route("post", "/v1/detokenize", "Convert token ids to text", Detokenized, DetokenizeRequest, None, POST_ERRORS),
    Route("get", "/tokenizer_info", "The tokenizer's class, special tokens and chat template", TokenizerInfo),
    Route("get", "/v1/models", "The model under each of its names, with its exits and limits", ModelList),
    Route("get", "/v1/models/{model_id}", "The model under one name", Model, errors=(*ERRORS, 404)),
    Route("get", "/livez", "Liveness probe: the engine makes progress", Status, errors=PROBE_ERRORS),
    Route("get", "/readyz", "Readiness probe: the server accepts requests", Status, errors=PROBE_ERRORS),
    Route("get", "/health", "Both probes in one", Status, errors=PROBE_ERRORS),
    Route("get", "/version", "The version of nvium", Version),
    Route("get", "/metrics", "Metrics for Prometheus. `--metrics-open` makes them public", None),
    Route("get", "/openapi.json", "This API as an OpenAPI 3.1 document", Json),
)


@router.get("/openapi.json")
async def openapi(request: Request) -> Json:
    root_path = request.app.state.service.settings.root_path
    return {**document(), "servers": [{"url": root_path}]} if root_path else document()


@cache
def document() -> Json:
    modes: dict[Any, JsonSchemaMode] = {Error: "serialization"}
    for route in ROUTES:
        modes |= {route.request: "validation"} if route.request else {}
        modes |= {kind: "serialization" for kind in (route.answer, route.chunk) if kind}
    kinds = [(kind, mode, TypeAdapter[Any](kind)) for kind, mode in modes.items()]
    schemas, definitions = TypeAdapter.json_schemas(kinds, ref_template=REF)
    refs = {kind: ref for (kind, _), ref in schemas.items()}
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "nvium", "version": "1"},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def operation(route: Route, refs: dict[Any, Json]) -> Json:
    responses: Json = {"200": {"description": "OK", "content": contents(route, refs)}}
    for status in sorted(route.errors):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": json_content(refs[Error])}
    described: Json = {"summary": route.summary, "responses": responses}
    if route.request:
        described["requestBody"] = {"required": True, "content": json_content(refs[route.request])}
    if names := re.findall(r"{(\w+)}", route.path):
        of_path = {"in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [{"name": name, **of_path} for name in names]
    return described


def json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def contents(route: Route, refs: dict[Any, Json]) -> Json:
    if route.answer is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    stream = {"text/event-stream": {"schema": event(refs[route.chunk], refs[Error])}} if route.chunk else {}
    return json_content(refs[route.answer]) | stream


def event(chunk: Json, error: Json) -> Json:
    """Describe an event of a stream in the form of OpenAPI 3.1."""
    content = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, error]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, content]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
