"""Splits a generated answer into reasoning, content and tool calls, incrementally."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nvium_core.text.reasoning import ReasoningReader
from nvium_core.text.tool_calls import CallPiece, ToolCallReader
from server.generation.delta import Delta
from server.generation.generation import Choice
from server.generation.service import Service
from server.schemas.chat import ChatRequest

FinishReason = Literal["stop", "length", "tool_calls"]


class AnswerPart(NamedTuple):
    reasoning: str
    content: str
    calls: list[CallPiece]


@dataclass
class AnswerReader:
    """Parses an answer. The result does not depend on where deltas split the text."""

    reasoning: ReasoningReader
    calls: ToolCallReader | None
    """None without callable tools: then all text after the reasoning is content."""
    may_be_text: bool
    """Whether an answer without a call is allowed. If not, an incomplete call is never content."""

    _begun_calls: list[CallPiece] = field(default_factory=list, init=False)
    """The start of calls that the prompt contains. The answer repeats it."""
    _begun_content: str = field(default="", init=False)
    """Text in the prompt that may become a call. The answer omits it."""

    def begin(self, continued: str, *, is_form: bool) -> None:
        """Parse the start of the answer that is already in the prompt, and its calls if the grammar consumed it."""
        answer = self.reasoning.push(continued).answer
        if self.calls and is_form:
            self._begun_calls = self.calls.push(answer).calls
            self._begun_content = self.calls.held

    def read(self, delta: Delta) -> AnswerPart:
        reasoning, text = self.reasoning.push(delta.text)
        if delta.finish_reason:
            rest = self.reasoning.flush()
            reasoning, text = reasoning + rest.reasoning, text + rest.answer
        if self.calls is None:
            return AnswerPart(reasoning, text, [])
        content, pieces = self.calls.push(text)
        pieces, self._begun_calls = self._begun_calls + pieces, []
        if delta.finish_reason and self.may_be_text:
            content += self.calls.flush()
        if content:
            content, self._begun_content = content.removeprefix(self._begun_content), ""
        return AnswerPart(reasoning, content, pieces)

    def finish_reason(self, delta: Delta) -> FinishReason | None:
        """Return the finish reason of a delta that has been read."""
        has_called = self.calls is not None and self.calls.is_complete
        return "tool_calls" if delta.finish_reason == "stop" and has_called else delta.finish_reason


def answer_reader(service: Service, request: ChatRequest, choice: Choice) -> AnswerReader:
    template, has_tools, given = service.chat_template, bool(request.callable_tools()), choice.text.calls
    form = template.call_format if has_tools else None
    reader = AnswerReader(
        template.reasoning_reader(choice.prompt.token_ids, is_continued=bool(given.continued)),
        ToolCallReader(form) if form else None,
        not has_tools or request.may_answer_in_text,
    )
    reader.begin(given.continued, is_form=given.has_begun)
    return reader
