"""From a checked request to its answer, whole or as a stream: what the two generating endpoints have in common."""

import asyncio
import re
from collections.abc import Sequence

import structlog
from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from nvium_core import EngineError
from server.errors import ApiError, as_api_error
from server.generation.generation import Delta, Generation
from server.generation.service import Service
from server.http.disconnect import unless_disconnected
from server.http.event_stream import DONE, EventStream
from server.schemas.body import RequestBody
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest
from server.telemetry.record import RequestRecord
from server.writers.writer import Writer

CLIENT_CLOSED_REQUEST = 499
"""Nobody is left to read it."""

MANY_TOKENS = 2_000
"""Beyond them an answer is written off the event loop."""

HARMFUL_IN_HEADER = re.compile("[^][A-Za-z0-9_.-]")

log = structlog.get_logger("nvium.server")


def opened(request: Request, body: GenerationRequest) -> tuple[Service, RequestRecord]:
    """What serves a request and what is noted of it, once nothing in its body alone speaks against it."""
    service, record = request.app.state.service, request.state.record
    record.user = body.who
    service.check_accepting()
    service.check_model(body.model)
    body.check(service.limits)
    return service, record


async def answer(
    request: Request, body: GenerationRequest | ResponseRequest, generated: Generation, writer: Writer
) -> Response:
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    headers = ignored_params(body)
    if not body.stream:
        return await whole(request, generated, writer, headers)
    return EventStream(
        WrittenEvents(writer),
        headers=headers,
        keep_alive_seconds=service.settings.keep_alive_seconds,
        slow_client_seconds=service.settings.slow_client_seconds,
        on_failure=lambda error: told_in_stream(error, record),
        on_abort=record.aborted,
        on_close=generated.close,
    )


async def whole(request: Request, generated: Generation, writer: Writer, headers: dict[str, str]) -> Response:
    try:
        gained = await unless_disconnected(generated.collect(), request.receive)
    finally:
        generated.close()
    if gained is None:
        request.state.record.aborted("disconnected")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    num_told = sum(len(delta.tokens) + len(delta.prompt_scores) for delta in gained)
    written = await asyncio.to_thread(write, writer, gained) if num_told > MANY_TOKENS else write(writer, gained)
    return Response(written, headers=headers, media_type="application/json")


def write(writer: Writer, gained: Sequence[Delta]) -> bytes:
    return to_json(writer.whole(gained))


class WrittenEvents:
    """The events of a stream, written as they are taken."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._generation = writer.generation
        self._opening = [*map(to_json, writer.opening())]
        self.listen = writer.generation.listen

    @property
    def is_over(self) -> bool:
        return self._generation.is_over

    def take(self) -> list[bytes]:
        """Those of the deltas that came since the last time, within the first and the last of the stream."""
        deltas = self._generation.take()
        if not deltas:
            return []
        opening, self._opening = self._opening, []
        events = opening + [to_json(chunk) for delta in deltas for chunk in self._writer.chunks(delta)]
        return [*events, *map(to_json, self._writer.closing()), DONE] if self.is_over else events


def told_in_stream(error: Exception, record: RequestRecord) -> list[bytes]:
    """The events that end a stream in which something failed."""
    if not isinstance(error, EngineError | ApiError):
        log.error("a stream failed", request_id=record.request_id, exc_info=error)
    told = as_api_error(error)
    record.refused(told)
    return [to_json(told.body), DONE]


def ignored_params(body: RequestBody) -> dict[str, str]:
    """The header that names what was not understood, made safe for a header."""
    names = [HARMFUL_IN_HEADER.sub("?", name) or "?" for name in body.unknown_fields]
    return {"x-nvium-ignored-params": ", ".join(names)[:1000].rstrip(", ")} if names else {}
