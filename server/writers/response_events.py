"""Builds a response of `/v1/responses` item by item, with the event of each change."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from server.schemas.response_items import new_id
from server.schemas.responses import OutputItem, OutputPart, Response, ResponseEvent

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
            item["content"].append(new_part(item["type"]))
            yield self._of_part("response.content_part.added", part=self._part)

    def add_text(self, kind: TextKind, text: str, logprobs: Sequence[Any] = ()) -> Iterator[bytes]:
        """Add text to the last item or, if that has another type, to a new one."""
        if not (self.response["output"] and self.last["type"] == kind):
            yield from self.begin(new_text(kind))
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


def new_text(kind: TextKind) -> OutputItem:
    item: OutputItem = {"id": new_id(kind), "type": kind, "status": "in_progress", "content": []}
    if kind == "reasoning":
        item["summary"] = []
    else:
        item["role"] = "assistant"
    return item


def new_part(kind: TextKind) -> OutputPart:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
