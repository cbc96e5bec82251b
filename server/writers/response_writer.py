"""The bodies of `/v1/responses`, whole or as typed events, from the deltas of one request."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nvium_core.text.tool_calls import Spoken, ToolCallReader
from server.generation.generation import Delta, Generation
from server.generation.service import Service
from server.schemas.chat import ChatRequest
from server.schemas.responses import OutputItem, OutputText, Response, ResponseEvent, ResponseRequest
from server.writers.writer import Writer


class ResponseWriter(Writer):
    """`keep` is told of a response that has ended, so that it can be continued."""

    def __init__(
        self,
        service: Service,
        asked: ResponseRequest,
        chat: ChatRequest,
        generation: Generation,
        response_id: str,
        keep: Callable[[Response], None],
    ) -> None:
        super().__init__(service, chat, generation, response_id)
        self._keep = keep
        self._reader = ToolCallReader(service.chat_template.call_format) if chat.callable_tools() else None
        self._is_text_first = chat.may_answer_in_text or self._reader is None
        self._num_events = 0
        self._deltas = Delta(generation.choices[0])
        self._response: Response = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._envelope["model"],
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "store": asked.store,
            "temperature": asked.temperature,
            "text": asked.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": asked.tool_choice if isinstance(asked.tool_choice, str) else asked.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "metadata": asked.metadata,
            "usage": None,
        }

    def whole(self, gained: Sequence[Delta]) -> Any:
        for delta in gained:
            list(self.chunks(delta))
        return self._response

    def opening(self) -> Iterable[Any]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def chunk(self, delta: Delta) -> Any:
        raise NotImplementedError("a delta makes several events")

    def usage_chunk(self) -> Any:
        raise NotImplementedError("the last event tells the usage")

    def closing(self) -> Iterable[Any]:
        return ()

    def chunks(self, delta: Delta) -> Iterator[ResponseEvent]:
        """The events of one delta; the last delta ends the response."""
        self._choice(delta, 0)
        self._deltas.extend(delta)
        content, calls = self._reader.push(delta.text) if self._reader else Spoken(delta.text, [])
        if self._reader:
            content += self._reader.flush() if delta.finish_reason and self._is_text_first else ""
        if content:
            yield from self._say(content)
        for piece in calls:
            if piece.name:
                yield from self._begin_call(piece.name)
            if piece.arguments:
                yield self._grow_call(piece.arguments)
        if delta.finish_reason:
            yield from self._end(is_cut=delta.finish_reason == "length")

    def _say(self, text: str) -> Iterator[ResponseEvent]:
        if not self._response["output"]:
            item: OutputItem = {
                "id": f"msg_{uuid.uuid4().hex}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            yield self._add(item)
            item["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            yield self._of_part("response.content_part.added", part=item["content"][0])
        part = self._part
        part["text"] += text
        yield self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def _begin_call(self, name: str) -> Iterator[ResponseEvent]:
        yield from self._finish_item("completed")
        call: OutputItem = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": name,
            "arguments": "",
        }
        yield self._add(call)

    def _grow_call(self, arguments: str) -> ResponseEvent:
        self._item["arguments"] += arguments
        return self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _end(self, *, is_cut: bool) -> Iterator[ResponseEvent]:
        yield from self._finish_item("incomplete" if is_cut else "completed")
        response, usage = self._response, self._usage()
        response["status"] = "incomplete" if is_cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if self._tells_exits:
            summary = self._summed_up(self._envelope.copy())["nvium"]
            response["nvium"] = {**self._token_exits(self._deltas), **summary}
        self._keep(response)
        yield self._event(f"response.{response['status']}", response=response)

    def _finish_item(self, status: Any) -> Iterator[ResponseEvent]:
        if not self._response["output"]:
            return
        item = self._item
        item["status"] = status
        if item["type"] == "message":
            yield self._of_part("response.output_text.done", text=self._part["text"], logprobs=[])
            yield self._of_part("response.content_part.done", part=self._part)
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **told)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1

    @property
    def _item(self) -> OutputItem:
        return self._response["output"][-1]

    @property
    def _part(self) -> OutputText:
        return self._item["content"][0]

    def _add(self, item: OutputItem) -> ResponseEvent:
        self._response["output"].append(item)
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _of_part(self, kind: str, **more: Any) -> ResponseEvent:
        return self._of_item(kind, content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> ResponseEvent:
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **more)

    def _event(self, kind: str, **more: Any) -> ResponseEvent:
        self._num_events += 1
        event: Any = {"type": kind, "sequence_number": self._num_events - 1, **more}
        return event
