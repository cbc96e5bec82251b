"""The app up to validation: request bodies pass the middleware and the schemas, up to the engine's parameters."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Message

from nvium_core import ServerOptions
from nvium_core.text.answer_parsers import JSON_LINES
from server.admission import Loading
from server.app import bare_app, middleware
from server.http.bodies import JsonRoute
from server.http.middleware import LastResort, WhileServing
from server.routes.tokens import DetokenizeRequest, TokenizeRequest
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest
from server.settings import Settings
from server.telemetry.metrics import Metrics

BODIES: dict[str, Any] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
LIMITS = ServerOptions(max_n=8, max_prompts=4, max_new_tokens=1000)


def validating_app() -> FastAPI:
    """Return an app whose routes only validate. Unhandled exceptions are raised instead of answered."""
    layers = middleware(Settings(), Metrics(), None)
    around = [layer for layer in layers if layer.cls not in (LastResort, WhileServing)]
    app = bare_app(lambda _: nullcontext(), around)
    app.state.service = Loading(Settings())
    app.router.route_class = JsonRoute
    for path, kind in BODIES.items():
        app.post(path)(reader(kind))
    return app


def reader(kind: Any) -> Callable[..., Any]:
    async def read(body: Any) -> Response:
        asked = body.as_chat([]) if isinstance(body, ResponseRequest) else body
        if isinstance(asked, GenerationRequest):
            check_generation(asked)
        elif isinstance(asked, TokenizeRequest):
            asked.check()
        json.dumps([*body.unknown_fields()])
        return Response("read")

    read.__annotations__["body"] = kind
    return read


def check_generation(asked: GenerationRequest) -> None:
    """Validate as the routes do, without compiling a grammar."""
    asked.check(LIMITS)
    if isinstance(asked, ChatRequest):
        with asked.in_request_names():
            asked.conversation()
            asked.output_format(JSON_LINES, None)
            asked.params(None, 100, (), {})
    elif isinstance(asked, CompletionRequest):
        asked.params(None, 100, {})


async def answer(app: FastAPI, path: str, content: bytes) -> tuple[int, bytes]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": headers, "state": {}, "http_version": "1.1"}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
