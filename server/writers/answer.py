"""Sends the responses of the endpoints that generate text, whole or streamed."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from server.errors import engine_stopped
from server.generation.choice_text import Delta
from server.generation.service import Service
from server.http.event_stream import EventStream, unless_disconnected
from server.schemas.body import RequestBody
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest
from server.telemetry.record import CLIENT_CLOSED_REQUEST, RequestRecord
from server.writers.writer import Writer

MAX_INLINE_VALUES = 2_000
"""Responses of more tokens and alternatives are serialized on another thread."""

MAX_IGNORED_CHARACTERS = 1_000
"""Length of the header that names ignored fields, and so their maximum number."""

HARMFUL_IN_HEADER = re.compile("[^][A-Za-z0-9_.-]")


def accepted(request: Request, body: GenerationRequest) -> tuple[Service, RequestRecord]:
    """Check that the server accepts the request, and return its service and record. Raise `ApiError`."""
    service, record = request.app.state.service, request.state.record
    record.user = body.logged_user
    if not service.worker.is_alive:
        raise engine_stopped("the server's model has failed and needs a restart; retry later")
    service.checked_model(body.model)
    body.check(service.settings)
    return service, record


async def answer(request: Request, body: GenerationRequest | ResponseRequest, writer: Writer[Any]) -> Response:
    service: Service = request.app.state.service
    headers = ignored_params(body, writer.generation.ignored)
    if body.stream:
        return EventStream(writer, headers=headers, keep_alive_seconds=service.settings.keep_alive_seconds)
    try:
        deltas = await unless_disconnected(writer.generation.collect(), request.scope, request.receive)
        if deltas is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        num_values = sum(len(delta.tokens) + len(delta.prompt_scores) for delta in deltas)
        is_long = num_values * (1 + (writer.generation.params.logprobs or 0)) > MAX_INLINE_VALUES
        content = await service.text_threads.run(json_of, writer, deltas) if is_long else json_of(writer, deltas)
        writer.note_ends(deltas)
        return Response(content, headers=headers, media_type="application/json")
    finally:
        writer.close()


def json_of(writer: Writer[Any], deltas: list[Delta]) -> bytes:
    return to_json(writer.response(deltas))


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), headers=headers, media_type="application/json")


def ignored_params(body: RequestBody, more: Sequence[str] = ()) -> dict[str, str]:
    """Return the header that names `more` and the ignored fields. Unsafe characters become `?`."""
    first = islice(chain(more, body.unknown_fields()), MAX_IGNORED_CHARACTERS)
    names = [HARMFUL_IN_HEADER.sub("?", name[:MAX_IGNORED_CHARACTERS]) or "?" for name in first]
    return {"x-nvium-ignored-params": ", ".join(names)[:MAX_IGNORED_CHARACTERS].rstrip(", ")} if names else {}
