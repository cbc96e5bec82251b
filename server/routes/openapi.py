"""`GET /openapi.json`: every route but the page's, with its request and all its responses.

A test compares the table below with the app's routes.
"""

from collections.abc import Sequence
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

REFUSALS_OF_PROBES = (400, 405, 408, 500, 503)
"""Errors of probes: not HTTP, wrong method, incomplete request, failure, negative answer."""

REFUSALS = (400, 401, 405, 408, 429, 500)
"""Errors of other routes: also a missing key and too many requests."""

REFUSALS_OF_BODIES = (404, 413, 503)


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
    """`chunk` is the content of a stream's events, if the route streams."""

    method: str
    path: str
    summary: str
    answer: Any
    request: type[RequestBody] | None = None
    chunk: type | None = None
    refusals: tuple[int, ...] = REFUSALS


BODIES = REFUSALS + REFUSALS_OF_BODIES
TOKENS = "Tokens of a text or chat"
TEXT = "Text of tokens"
RESPONSES = "Answer messages, in the form that agents use; events if streamed"

ROUTES = (
    Route("post", "/v1/completions", "Continue prompts", Completion, CompletionRequest, Completion, BODIES),
    Route("post", "/v1/chat/completions", "Answer messages", Chat, ChatRequest, ChatChunk, BODIES),
    Route("post", "/v1/responses", RESPONSES, Response, ResponseRequest, ResponseEvent, BODIES),
    Route("get", "/v1/responses/{response_id}", "A response that is still kept", Response, refusals=(*REFUSALS, 404)),
    Route("delete", "/v1/responses/{response_id}", "Forget it", DeletedResponse, refusals=(*REFUSALS, 404)),
    Route("post", "/tokenize", TOKENS, Tokens, TokenizeRequest, None, BODIES),
    Route("post", "/v1/tokenize", TOKENS, Tokens, TokenizeRequest, None, BODIES),
    Route("post", "/detokenize", TEXT, Detokenized, DetokenizeRequest, None, BODIES),
    Route("post", "/v1/detokenize", TEXT, Detokenized, DetokenizeRequest, None, BODIES),
    Route("get", "/tokenizer_info", "The tokenizer's class, special tokens and chat template", TokenizerInfo),
    Route("get", "/v1/models", "The model under each of its names, with its exits and limits", ModelList),
    Route("get", "/v1/models/{model_id}", "The same, by one name", Model, refusals=(*REFUSALS, 404)),
    Route("get", "/livez", "Liveness probe: the engine makes progress", Status, refusals=REFUSALS_OF_PROBES),
    Route("get", "/readyz", "Readiness probe: requests are accepted", Status, refusals=REFUSALS_OF_PROBES),
    Route("get", "/health", "Both probes in one", Status, refusals=REFUSALS_OF_PROBES),
    Route("get", "/version", "The version of nvium", Version),
    Route("get", "/metrics", "Metrics for Prometheus; `--metrics-open` lets them be read without a key", None),
    Route("get", "/openapi.json", "These endpoints as an OpenAPI 3.1 document", Json),
)


@router.get("/openapi.json")
async def openapi(request: Request) -> Json:
    root_path = request.app.state.service.settings.root_path
    return {**document(), "servers": [{"url": root_path}]} if root_path else document()


@cache
def document() -> Json:
    """OpenAPI 3.1."""
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
    described: Json = {"summary": route.summary, "responses": responses(route, refs)}
    if route.request:
        content = {"application/json": {"schema": refs[route.request]}}
        described["requestBody"] = {"required": True, "content": content}
    if names := parameters(route.path):
        described["parameters"] = [path_parameter(name) for name in names]
    return described


def responses(route: Route, refs: dict[Any, Json]) -> Json:
    refused = {"application/json": {"schema": refs[Error]}}
    answered = {status: (HTTPStatus(status).phrase, refused) for status in sorted(route.refusals)}
    answered[200] = ("OK", contents(route, refs))
    return {str(status): {"description": phrase, "content": content} for status, (phrase, content) in answered.items()}


def contents(route: Route, refs: dict[Any, Json]) -> Json:
    if route.answer is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    whole = {"application/json": {"schema": refs[route.answer]}}
    if route.chunk is None:
        return whole
    return whole | {"text/event-stream": {"schema": event(refs[route.chunk], refs[Error])}}


def event(chunk: Json, error: Json) -> Json:
    """One event of a stream, as OpenAPI 3.1 describes event streams."""
    content = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, error]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, content]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def parameters(path: str) -> Sequence[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
