"""The base classes of the writers, which turn the deltas of one request into JSON, and what sends that JSON."""

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from server.errors import engine_stopped
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.http.event_stream import DONE, EventStream, unless_disconnected
from server.schemas.body import RequestBody
from server.schemas.generation import (
    ExitSummary,
    Generated,
    GeneratedChoice,
    GenerationRequest,
    StreamOptions,
    TokenExits,
    Usage,
)
from server.schemas.responses import ResponseRequest
from server.telemetry.metrics import EndReason
from server.telemetry.record import CLIENT_CLOSED_REQUEST, RequestRecord

MIN_LOGPROB = -9999.0  # replaces log 0: JSON has no infinity

AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)

MAX_INLINE_VALUES = 2_000
"""Responses of more tokens and alternatives are serialized on another thread."""

MAX_IGNORED_CHARACTERS = 1_000
"""Length of the header that names ignored fields, and so their maximum number."""

HARMFUL_IN_HEADER = re.compile("[^][A-Za-z0-9_.-]")


class Writer(ABC, Generic[AnyRequest]):
    """Writes a response whole or as events. Counts tokens and exits over all choices."""

    def __init__(self, service: Service, request: AnyRequest, generation: Generation) -> None:
        self.generation = generation
        self.listen, self.close = generation.listen, generation.close
        self._service = service
        self._request = request
        self._has_begun = False
        self._model = service.checked_model(request.model)
        self._num_generated = 0
        self._exit_counts: Counter[int] = Counter()

    def take(self) -> list[bytes] | None:
        """Return the events since the last call, with those that open and close the stream, or None after the end."""
        deltas = self.generation.take()
        if not deltas:
            return None if self.generation.is_over else []
        events = [] if self._has_begun else self._opening()
        self._has_begun = True
        for delta in deltas:
            events += self._events(delta)
        self.note_ends(deltas)
        return [*events, *self._closing(), DONE] if self.generation.is_over else events

    def note_ends(self, deltas: Sequence[Delta]) -> None:
        """Record the choices that end with these deltas. Call it after writing the deltas."""
        for delta in deltas:
            if reason := self._finish_reason(delta):
                self.generation.choices[delta.index].record.choice_ended(reason)

    def _finish_reason(self, delta: Delta) -> EndReason | None:
        return delta.finish_reason

    @abstractmethod
    def response(self, deltas: Sequence[Delta]) -> Mapping[str, object]:
        """Return the whole response from one complete delta for each choice."""

    @abstractmethod
    def _events(self, delta: Delta) -> Iterable[bytes]:
        """Return the events for one delta."""

    def _opening(self) -> list[bytes]:
        """Return the events before the first delta."""
        return []

    def _closing(self) -> list[bytes]:
        """Return the events after the last delta."""
        return []

    def _count(self, delta: Delta) -> None:
        self._num_generated += len(delta.tokens)
        for event in delta.tokens:
            self._exit_counts[event.exit] += 1

    def _token_exits(self, delta: Delta) -> TokenExits:
        exits: TokenExits = {
            "token_ids": [event.token_id for event in delta.tokens],
            "exits": [event.exit for event in delta.tokens],
            "exit_layers": [self._service.exit_layers[event.exit - 1] for event in delta.tokens],
            "exit_probabilities": [event.exit_probability for event in delta.tokens],
        }
        if self._request.nvium.text_offsets:
            exits["text_offsets"] = delta.text_offsets
        if self._request.nvium.probabilities:
            exits["probabilities"] = [list(event.score.exit_probabilities) for event in delta.tokens if event.score]
        return exits

    def _exit_summary(self) -> ExitSummary:
        depths = self._service.exit_layers
        counts = [self._exit_counts[number] for number, _ in enumerate(depths, start=1)]
        layers_run: int = sum(count * depth for count, depth in zip(counts, depths, strict=True))
        return {"exit_counts": counts, "mean_depth": layers_run / (max(1, sum(counts)) * depths[-1])}

    def _usage(self) -> Usage:
        """Return the usage. It counts each prompt once, and the generated tokens of all choices."""
        leaders = self.generation.choices[:: self._request.num_choices]
        num_prompt, num_generated = sum(len(choice.prompt.token_ids) for choice in leaders), self._num_generated
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in leaders)},
        }


class ChunkWriter(Writer[AnyRequest]):
    """Writes a stream of chunks. Subclasses define the format of a chunk."""

    chunk_object: ClassVar[str]
    """The chunks' `object` field."""

    def __init__(self, service: Service, request: AnyRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation)
        self._options = request.stream_options or StreamOptions()
        self._num_ended = 0
        self._envelope: Generated = {
            "id": response_id,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": service.fingerprint,
        }

    def _closing(self) -> list[bytes]:
        if not self._options.include_usage:
            return []
        return [to_json({**self._envelope, "usage": self._usage(), "object": self.chunk_object, "choices": []})]

    def _choice(self, delta: Delta, index: int) -> GeneratedChoice:
        """Return the common fields of a choice, and count its tokens as generated."""
        self._count(delta)
        self._num_ended += delta.finish_reason is not None
        fields: GeneratedChoice = {"index": index, "finish_reason": delta.finish_reason}
        if self._request.nvium.metadata:
            fields["nvium"] = self._token_exits(delta)
        if self._request.return_token_ids:
            fields["token_ids"] = [event.token_id for event in delta.tokens]
        return fields

    def _response_fields(self) -> Generated:
        """Return the common fields of a whole response. Call it after writing the choices."""
        return self._with_summary({**self._envelope, "usage": self._usage()})

    def _chunk_fields(self) -> Generated:
        """Return the common fields of a chunk. Call it after writing the chunk's choice, which the summary counts."""
        fields = self._envelope.copy()
        if self._options.counts_continuously:
            fields["usage"] = self._usage()
        elif self._options.include_usage:
            fields["usage"] = None
        return self._with_summary(fields) if self._num_ended == len(self.generation.choices) else fields

    def _with_summary(self, fields: Generated) -> Generated:
        if self._request.nvium.metadata:
            fields["nvium"] = self._exit_summary()
        if self._request.metadata is not None:
            fields["metadata"] = self._request.metadata
        return fields


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

        def write() -> bytes:
            return to_json(writer.response(deltas))

        num_values = sum(len(delta.tokens) + len(delta.prompt_scores) for delta in deltas)
        is_long = num_values * (1 + (writer.generation.params.logprobs or 0)) > MAX_INLINE_VALUES
        content = await service.text_threads.run(write) if is_long else write()
        writer.note_ends(deltas)
        return Response(content, headers=headers, media_type="application/json")
    finally:
        writer.close()


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), headers=headers, media_type="application/json")


def ignored_params(body: RequestBody, more: Sequence[str] = ()) -> dict[str, str]:
    """Return the header that names `more` and the ignored fields. Unsafe characters become `?`."""
    first = islice(chain(more, body.unknown_fields()), MAX_IGNORED_CHARACTERS)
    names = [HARMFUL_IN_HEADER.sub("?", name[:MAX_IGNORED_CHARACTERS]) or "?" for name in first]
    return {"x-nvium-ignored-params": ", ".join(names)[:MAX_IGNORED_CHARACTERS].rstrip(", ")} if names else {}
