"""Writes the responses of `/v1/responses`, whole or item by item, with the typed event of each change."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from nvium_core import SamplingParams
from nvium_core.text.answer_parsers import CallPiece
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.chat import ChatRequest
from server.schemas.generation import AnswerEnd
from server.schemas.response_items import new_id
from server.schemas.responses import OutputItem, OutputPart, Response, ResponseEvent, ResponseRequest, ResponseUsage
from server.writers.chunk_writers import AnswerParser, chat_logprobs
from server.writers.writer import Writer

TextKind = Literal["message", "reasoning"]


class ResponseEvents:
    """A response in progress. Each method makes a change, and yields its events."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self._num_events = 0

    def opening(self) -> list[bytes]:
        return [self._event(kind, response=self.response) for kind in ("response.created", "response.in_progress")]

    def begin(self, item: OutputItem) -> Iterator[bytes]:
        """Complete the last item and append an empty one."""
        yield from self._finish_item("completed")
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        if item["type"] != "function_call":
            is_reasoning = item["type"] == "reasoning"
            message_part: OutputPart = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append({"type": "reasoning_text", "text": ""} if is_reasoning else message_part)
            yield self._of_part("response.content_part.added", part=self._part)

    def add_text(self, kind: TextKind, text: str, logprobs: Sequence[Any] = ()) -> Iterator[bytes]:
        """Add text to the last item or, if that has another type, to a new one."""
        if not (self.response["output"] and self.last["type"] == kind):
            item: OutputItem = {"id": new_id(kind), "type": kind, "status": "in_progress", "content": []}
            item |= {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self.begin(item)
        part, scores = self._part, dict[str, Any]()
        part["text"] += text
        if "logprobs" in part:
            part["logprobs"] += logprobs
            scores["logprobs"] = logprobs
        yield self._of_part(f"response.{part['type']}.delta", delta=text, **scores)

    def add_arguments(self, arguments: str) -> Iterator[bytes]:
        self.last["arguments"] += arguments
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def end(self, status: Literal["completed", "incomplete"], **fields: Any) -> Iterator[bytes]:
        """Complete the last item and the response. `fields` are added to the response."""
        yield from self._finish_item(status)
        self.response |= {"status": status, **fields}  # type: ignore[typeddict-item]
        yield self._event(f"response.{status}", response=self.response)

    @property
    def last(self) -> OutputItem:
        return self.response["output"][-1]

    def _finish_item(self, status: Any) -> Iterator[bytes]:
        if not self.response["output"]:
            return
        item = self.last
        item["status"] = status
        if item["type"] != "function_call":
            part = self._part
            done = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            yield self._of_part(f"response.{part['type']}.done", **done)
            yield self._of_part("response.content_part.done", part=part)
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **call)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    @property
    def _part(self) -> OutputPart:
        return self.last["content"][0]

    def _of_part(self, kind: str, **more: Any) -> bytes:
        return self._of_item(kind, content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self.last["id"], output_index=self._index, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        event: ResponseEvent = {"type": kind, "sequence_number": self._num_events, **more}  # type: ignore[typeddict-item]
        self._num_events += 1
        return b"event: %b\ndata: %b" % (kind.encode(), to_json(event))


def replayed(stored: Response) -> list[bytes]:
    """Return the events of a finished response, with one delta for each of its texts."""
    begun: Response = {**stored, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    begun.pop("nvium", None)
    events = ResponseEvents(begun)
    made = events.opening()
    for item in stored["output"]:
        kind: Any = item["type"]
        empty: Any = {"content": []} if "content" in item else {"arguments": ""}
        made += events.begin({**item, "status": "in_progress", **empty})
        for part in item.get("content", ()):
            made += events.add_text(kind, part["text"], part.get("logprobs", ()))
        if item.get("arguments"):
            made += events.add_arguments(item["arguments"])
    last: Any = {name: value for name, value in stored.items() if name not in ("status", "output")}
    status: Any = stored["status"]
    return [*made, *events.end(status, **last)]


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
