"""Writes the responses of `/v1/responses`, whole or as typed events."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from nvium_core import SamplingParams
from server.generation.choice_text import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.chat import ChatRequest
from server.schemas.generation import AnswerEnd
from server.schemas.responses import OutputItem, OutputPart, Response, ResponseEvent, ResponseRequest, ResponseUsage
from server.writers.answer_parser import AnswerParser
from server.writers.writer import Writer

TextKind = Literal["message", "reasoning"]
NO_LOGPROBS: dict[TextKind, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}


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
        self._num_events = 0
        self._total = Delta(index=0)
        self._response = new_response(asked, chat, generation.params, response_id, self._model)

    def response(self, deltas: Sequence[Delta]) -> Response:
        for delta in deltas:
            list(self._events(delta))
        return self._response

    def _opening(self) -> list[bytes]:
        return [self._event(kind, response=self._response) for kind in ("response.created", "response.in_progress")]

    def _events(self, delta: Delta) -> Iterator[bytes]:
        self._count(delta)
        self._total.extend(delta)
        reasoning, content, calls = self._parser.parse(delta)
        if reasoning:
            yield from self._add_text("reasoning", reasoning)
        if content:
            yield from self._add_text("message", content)
        for piece in calls:
            if piece.name:
                yield from self._begin_call(piece.name, piece.id)
            if piece.arguments:
                self._item["arguments"] += piece.arguments
                yield self._of_item("response.function_call_arguments.delta", delta=piece.arguments)
        if delta.finish_reason:
            yield from self._end(is_cut=delta.finish_reason == "length")

    def _add_text(self, kind: TextKind, text: str) -> Iterator[bytes]:
        if not self._response["output"] or self._item["type"] != kind:
            yield from self._finish_item("completed")
            yield self._add(new_text(kind))
            self._item["content"].append(new_part(kind))
            yield self._of_part("response.content_part.added", part=self._part)
        self._part["text"] += text
        yield self._of_part(f"response.{self._part['type']}.delta", delta=text, **NO_LOGPROBS[kind])

    def _begin_call(self, name: str, call_id: str) -> Iterator[bytes]:
        yield from self._finish_item("completed")
        call: OutputItem = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        if namespace := self._asked.namespace(name):
            call["namespace"] = namespace
        yield self._add(call)

    def _end(self, *, is_cut: bool) -> Iterator[bytes]:
        yield from self._finish_item("incomplete" if is_cut else "completed")
        response = self._response
        response["status"] = "incomplete" if is_cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = self._response_usage()
        if self._request.nvium.metadata:
            response["nvium"] = {**self._token_exits(self._total), **self._exit_summary()}
        self._keep(response)
        yield self._event(f"response.{response['status']}", response=response)

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

    def _finish_item(self, status: Any) -> Iterator[bytes]:
        if not self._response["output"]:
            return
        item = self._item
        item["status"] = status
        if item["type"] != "function_call":
            part = self._part
            yield self._of_part(f"response.{part['type']}.done", text=part["text"], **NO_LOGPROBS[item["type"]])
            yield self._of_part("response.content_part.done", part=part)
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **call)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1

    @property
    def _item(self) -> OutputItem:
        return self._response["output"][-1]

    @property
    def _part(self) -> OutputPart:
        return self._item["content"][0]

    def _add(self, item: OutputItem) -> bytes:
        self._response["output"].append(item)
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _of_part(self, kind: str, **more: Any) -> bytes:
        return self._of_item(kind, content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        event: ResponseEvent = {"type": kind, "sequence_number": self._num_events, **more}  # type: ignore[typeddict-item]
        self._num_events += 1
        return b"event: %b\ndata: %b" % (kind.encode(), to_json(event))


def new_text(kind: TextKind) -> OutputItem:
    if kind == "reasoning":
        return {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", "summary": [], "content": []}
    return {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", "role": "assistant", "content": []}


def new_part(kind: TextKind) -> OutputPart:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


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
        "truncation": "disabled",
        "metadata": asked.metadata,
        "usage": None,
    }
