"""Splits a generated answer into reasoning, content and tool calls, incrementally."""

from typing import NamedTuple

from nvium_core.text.tool_calls import CallPiece, ToolCallParser
from server.generation.choice_text import Delta
from server.generation.generation import Choice
from server.generation.service import Service
from server.schemas.chat import ChatRequest
from server.schemas.generation import AnswerEnd


class AnswerPart(NamedTuple):
    reasoning: str
    content: str
    calls: list[CallPiece]


class AnswerParser:
    """Parses the answer of one choice. The result does not depend on where deltas split the text."""

    def __init__(self, service: Service, request: ChatRequest, choice: Choice) -> None:
        template, has_tools = service.chat_template, bool(request.callable_tools())
        call_format = template.call_format if has_tools else None
        self.reasoning = template.reasoning_parser(choice.prompt.token_ids, request.continued)
        self.calls = ToolCallParser(call_format) if call_format else None
        """None if no tool can be called. Then all text after the reasoning is content."""
        self.may_be_text = not has_tools or request.may_answer_in_text
        """Whether an answer without a call is allowed. If it is not, an incomplete call never becomes content."""

    def parse(self, delta: Delta) -> AnswerPart:
        reasoning, text = self.reasoning.push(delta.text)
        if delta.finish_reason:
            rest = self.reasoning.flush()
            reasoning, text = reasoning + rest.reasoning, text + rest.answer
        if self.calls is None:
            return AnswerPart(reasoning, text, [])
        content, pieces = self.calls.push(text)
        if delta.finish_reason and self.may_be_text:
            content += self.calls.flush()
        return AnswerPart(reasoning, content, pieces)

    def finish_reason(self, delta: Delta) -> AnswerEnd | None:
        has_called = self.calls is not None and self.calls.is_complete
        return "tool_calls" if delta.finish_reason == "stop" and has_called else delta.finish_reason
