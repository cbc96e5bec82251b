"""Target: request bodies pass the middleware and validation, up to the engine's parameters."""

import asyncio
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from random import Random
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Message

from nvium_core import ServerOptions
from nvium_core.text.tool_calls import JSON_LINES
from server.app import bare_app, middleware
from server.http.bodies import JsonRoute
from server.http.middleware import LastResort
from server.http.starting import Loading, UntilLoaded
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from server.settings import Settings
from server.telemetry.metrics import Metrics
from tests.fuzzing.choices import Choices
from tests.server.fuzz import ENDPOINTS, body, encoded

BODIES: dict[str, Any] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PATHS = list(BODIES)
MADE = len(PATHS)
"""If an input's first byte is `MADE`, the other bytes steer a random body. Below, they are the body for that path."""

LIMITS = ServerOptions(max_n=8, max_prompts=4, max_new_tokens=1000)
RESPONSE = {
    "model": "default",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
}


def seeds() -> Iterator[bytes]:
    chance = Random(0)
    for number, path in enumerate(PATHS):
        yield from (bytes([number]) + json.dumps(body(path, chance)).encode() for _ in range(12))
    yield from (bytes([MADE]) + chance.randbytes(60) for _ in range(12))


def target() -> Callable[[bytes], None]:
    loop = asyncio.new_event_loop()
    app = schemas_app()

    def check(data: bytes) -> None:
        kind = data[0] % (MADE + 1) if data else 0
        path, content = made(data[1:]) if kind == MADE else (PATHS[kind], data[1:])
        status, response = loop.run_until_complete(answer(app, path, content))
        assert status in (200, 400, 413), response
        if status != 200:
            assert list(json.loads(response)["error"]) == ["message", "type", "param", "code"]
            assert len(response) < 10_000

    weakref.finalize(check, loop.close)
    return check


def made(data: bytes) -> tuple[str, bytes]:
    chance = Choices(data)
    path = chance.choice(list(ENDPOINTS))
    return path, encoded(body(path, chance), chance)


def schemas_app() -> FastAPI:
    """Return an app whose routes only validate. Unhandled exceptions are raised instead of answered."""
    layers = middleware(Settings(), Metrics(), None)
    around = [layer for layer in layers if layer.cls not in (LastResort, UntilLoaded)]
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
    assert asked.logged_user is None or asked.logged_user.isprintable()
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
