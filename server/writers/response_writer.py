"""Writes the responses of `/v1/responses`, whole or as typed events."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nvium_core import SamplingParams
from nvium_core.text.tool_calls import CallPiece
from server.generation.choice_text import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.chat import ChatRequest
from server.schemas.generation import AnswerEnd
from server.schemas.response_items import new_id
from server.schemas.responses import OutputItem, Response, ResponseRequest, ResponseUsage
from server.writers.chat_writer import AnswerParser
from server.writers.logprobs import chat_logprobs
from server.writers.response_events import ResponseEvents
from server.writers.writer import Writer


class ResponseWriter(Writer[ChatRequest]):
    """Writes one response. Calls `keep` with the finished response."""

    def __init__(
        self,
        service: Service,
        asked: ResponseRequest,
        chat: ChatRequest,
        generation: Generation,
        response_id: str,
        keep: Callable[[Response], None],
    ) -> None:
        super().__init__(service, chat, generation)
        self._asked = asked
        self._keep = keep
        self._parser = AnswerParser(service, chat, generation.choices[0])
        self._total = Delta(index=0)
        self._text_end = 0
        """Where the last message's text ends so far, in characters of the answer."""
        self._made = ResponseEvents(new_response(asked, chat, generation.params, response_id, self._model))

    def response(self, deltas: Sequence[Delta]) -> Response:
        for delta in deltas:
            list(self._events(delta))
        return self._made.response

    def _opening(self) -> list[bytes]:
        return self._made.opening()

    def _events(self, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        self._total.extend(delta)
        reasoning, content, calls = self._parser.parse(delta)
        if reasoning:
            yield from self._made.add_text("reasoning", reasoning)
        if content:
            logprobs = self._logprobs(content) if self._request.logprobs else ()
            yield from self._made.add_text("message", content, logprobs)
        for piece in calls:
            yield from self._add_call(piece)
        if delta.finish_reason:
            yield from self._end(is_cut=delta.finish_reason == "length")

    def _logprobs(self, text: str) -> list[Any]:
        """Return the log-probabilities of the tokens that begin in new text of a message."""
        since = max(self._text_end, self._parser.reasoning.num_characters)
        start = self._total.text.index(text, since)
        self._text_end = start + len(text)
        first, end = (bisect_left(self._total.text_offsets, place) for place in (start, self._text_end))
        tokens = self._total.tokens[first:end]
        return [*chat_logprobs(self._service.vocabulary, tokens, self._request.top_logprobs or 0)]

    def _add_call(self, piece: CallPiece) -> Iterator[bytes]:
        if piece.name:
            call: OutputItem = {
                "id": new_id("function_call"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            if namespace := self._asked.namespace(piece.name):
                call["namespace"] = namespace
            yield from self._made.begin(call)
        if piece.arguments:
            yield from self._made.add_arguments(piece.arguments)

    def _end(self, *, is_cut: bool) -> Iterator[bytes]:
        metadata = self._request.nvium.metadata
        exits = {"nvium": {**self._token_exits(self._total), **self._exit_summary()}} if metadata else {}
        details = {"reason": "max_output_tokens"} if is_cut else None
        status: Any = "incomplete" if is_cut else "completed"
        yield from self._made.end(status, incomplete_details=details, usage=self._response_usage(), **exits)
        self._keep(self._made.response)

    def _finish_reason(self, delta: Delta) -> AnswerEnd | None:
        return self._parser.finish_reason(delta)

    def _response_usage(self) -> ResponseUsage:
        usage = self._usage()
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning_end = self._parser.reasoning.num_characters
        num_reasoning_tokens = sum(offset < reasoning_end for offset in self._total.text_offsets)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def new_response(
    asked: ResponseRequest, chat: ChatRequest, params: SamplingParams, response_id: str, model: str
) -> Response:
    """Return the response as it is before the first token."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": chat.may_call_again,
        "previous_response_id": asked.previous_response_id,
        "store": asked.store,
        "temperature": params.temperature,
        "text": asked.text.model_dump(exclude_none=True, exclude={"format"}) | {"format": asked.text.format.echoed()},
        "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else asked.tool_choice.model_dump(),
        "tools": [tool.model_dump(exclude_unset=True) for tool in asked.tools],
        "top_p": params.top_p,
        "top_logprobs": asked.top_logprobs or 0,
        "truncation": asked.truncation,
        "metadata": asked.metadata,
        "usage": None,
    }
