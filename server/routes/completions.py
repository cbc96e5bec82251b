"""`POST /v1/completions`: parse, admit, and answer whole or as a stream."""

import json
from collections.abc import AsyncIterator

import structlog
from fastapi import APIRouter, Request
from starlette.responses import Response

from nvium_core import EngineError
from server import generation
from server.completion_writer import CompletionWriter
from server.disconnect import unless_disconnected
from server.errors import as_api_error
from server.event_stream import DONE, EventStream
from server.generation import Generation
from server.record import RequestRecord
from server.schemas import CompletionRequest
from server.service import Service

CLIENT_CLOSED_REQUEST = 499
"""Nobody is left to read it."""

log = structlog.get_logger("nvium.server")
router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    generated = await begin(service, body, record)
    writer = CompletionWriter(service, body, generated, completion_id=f"cmpl-{record.request_id}")
    headers = ignored_params(body)
    if not body.stream:
        return await whole(writer, generated, request, record, headers)
    return EventStream(
        events(writer, generated, record),
        headers=headers,
        keep_alive_seconds=service.settings.keep_alive_seconds,
        on_disconnect=record.disconnected,
        on_close=generated.close,
    )


async def begin(service: Service, body: CompletionRequest, record: RequestRecord) -> Generation:
    """Everything that can be refused is refused here."""
    limits = service.settings
    service.check_accepting()
    service.check_model(body.model)
    body.check(max_n=limits.max_n, max_prompts=limits.max_prompts, max_new_tokens=limits.max_new_tokens)
    prompts = await service.read_prompts(body.prompts)
    return generation.start(service, body, prompts, record)


async def whole(
    writer: CompletionWriter, generated: Generation, request: Request, record: RequestRecord, headers: dict[str, str]
) -> Response:
    try:
        completion = await unless_disconnected(writer.whole(), request.receive)
    finally:
        generated.close()
    if completion is None:
        record.disconnected()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(completion.json_text(), headers=headers, media_type="application/json")


async def events(writer: CompletionWriter, generated: Generation, record: RequestRecord) -> AsyncIterator[str]:
    """The stream's events; an error is one of them, as the status line is long gone."""
    try:
        async for delta in generated.deltas():
            yield writer.chunk(delta).json_text()
        if writer.wants_usage:
            yield writer.usage_chunk().json_text()
    except Exception as error:
        if not isinstance(error, EngineError):
            log.exception("a stream failed", request_id=record.request_id)
        told = as_api_error(error)
        record.refused(told)
        yield json.dumps(told.body)
    yield DONE


def ignored_params(body: CompletionRequest) -> dict[str, str]:
    """The header that names what was not understood, made safe for a header."""
    names = ["".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in n) for n in body.unknown_fields]
    return {"x-nvium-ignored-params": ", ".join(names)[:1000]} if names else {}
