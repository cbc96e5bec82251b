"""`POST /tokenize` and `POST /detokenize`."""

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from server.generation.service import Service
from server.http.bodies import JsonRoute
from server.http.event_stream import unless_disconnected
from server.schemas.body import MaxItems, RequestBody, Text, require
from server.schemas.json_text import MAX_VALUES
from server.schemas.messages import Messages
from server.schemas.template import TemplateOptions
from server.schemas.unsupported import check_unsupported
from server.telemetry.record import CLIENT_CLOSED_REQUEST
from server.writers.writer import ignored_params, json_response

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(TemplateOptions):
    """A prompt, or messages with the template fields of chats."""

    model: Text | None = None
    """The model's id, or `default`."""
    prompt: Text | None = None
    """A text."""
    messages: Messages | None = None
    """The messages of a chat."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to a prompt, by default `true`. Not allowed with messages."""

    def check(self) -> None:
        """Raise `InvalidField` if fields contradict each other."""
        check_unsupported(self)
        require((self.prompt is None) != (self.messages is None), "prompt", "give exactly one of prompt and messages")
        require(self.messages is not None or not self.tools, "tools", "only allowed with messages")
        given = self.continue_final_message or self.chat_template_kwargs or self.add_generation_prompt
        require(self.messages is not None or not given, "messages", "required with fields of the chat template")
        if self.messages is not None:
            self.check_template(self.messages)
        adds = bool(self.messages and self.add_special_tokens)
        require(not adds, "add_special_tokens", "not supported with messages: the chat template adds them")


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    """The model's id, or `default`."""
    tokens: Annotated[list[int], MaxItems(MAX_VALUES)]
    """Token ids."""


class Detokenized(BaseModel):
    """The text of the tokens, including special tokens."""

    prompt: str


@router.post("/v1/tokenize", summary="Tokenize a text or a chat", response_model=Tokens)
@router.post("/tokenize", summary="Tokenize a text or a chat", response_model=Tokens)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.checked_model(body.model)
    body.check()
    headers = ignored_params(body, body.ineffective(service.chat_template))

    def compute() -> Response:
        if body.messages is None:
            token_ids = service.encode(body.prompt or "", adds_special_tokens=body.add_special_tokens is not False)
        else:
            token_ids = service.chat_template.prompt(body.conversation_of(body.messages, body.tools))
        tokens = Tokens(count=len(token_ids), max_model_len=service.engine.context, tokens=token_ids)
        return json_response(tokens, headers)

    return await computed(request, compute)


@router.post("/v1/detokenize", summary="Convert token ids to text", response_model=Detokenized)
@router.post("/detokenize", summary="Convert token ids to text", response_model=Detokenized)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    service.checked_model(body.model)

    def compute() -> Response:
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < service.vocab_size), None)
        require(wrong is None, "tokens", f"must be token ids in [0, {service.vocab_size}), got {wrong}")
        prompt = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return json_response(Detokenized(prompt=prompt), ignored_params(body))

    return await computed(request, compute)


async def computed(request: Request, compute: Callable[[], Response]) -> Response:
    """Compute a response on the tokenizing thread. A client that hangs up before its turn costs no time."""
    service: Service = request.app.state.service
    async with service.within_deadline(time.monotonic()):
        response = await unless_disconnected(service.tokenizing_thread.run(compute), request.scope, request.receive)
    return response or Response(status_code=CLIENT_CLOSED_REQUEST)
