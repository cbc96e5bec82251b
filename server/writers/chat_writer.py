"""Writes the response bodies of `/v1/chat/completions`, and splits answers into reasoning, content and tool calls."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic_core import to_json

from nvium_core.text.tool_calls import CallPiece, ToolCallParser
from server.generation.choice_text import Delta
from server.generation.generation import Choice, Generation
from server.generation.service import Service
from server.schemas.chat import (
    AnyChatChoice,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    MadeToolCall,
)
from server.schemas.generation import AnswerEnd, PromptTokenIds
from server.writers.logprobs import chat_logprobs
from server.writers.writer import ChunkWriter

CHUNK: Literal["chat.completion.chunk"] = "chat.completion.chunk"


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


class ChatWriter(ChunkWriter[ChatRequest]):
    chunk_object = CHUNK

    def __init__(self, service: Service, request: ChatRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._parsers = [AnswerParser(service, request, choice) for choice in generation.choices]
        self._has_tools = self._parsers[0].calls is not None
        self._is_text_first = self._parsers[0].may_be_text
        self._streamed = [Delta(choice.index) for choice in generation.choices]
        """The tokens streamed so far, for each choice."""
        self._hidden: dict[int, Delta] = {}
        """Deltas without text, such as the syntax of a call. The choice's next chunk contains their tokens."""

    def response(self, deltas: Sequence[Delta]) -> Chat:
        choices: list[ChatChoice] = [{"message": self._message(d), **self._chat_choice(d)} for d in deltas]
        return {**self._response_fields(), "object": "chat.completion", "choices": choices, **self._prompt_token_ids()}

    def _opening(self) -> list[bytes]:
        message: ChatMessage = {"role": "assistant", "content": "" if self._is_text_first else None}
        first, *others = [self._chunk_of(Delta(choice.index), message) for choice in self.generation.choices]
        return [to_json({**first, **self._prompt_token_ids()}), *map(to_json, others)]

    def _events(self, delta: Delta) -> list[bytes]:
        message = self._new_part(delta)
        if hidden := self._hidden.pop(delta.index, None):
            hidden.extend(delta)
            delta = hidden
        if message or delta.finish_reason:
            return [to_json(self._chunk(delta, message))]
        self._hidden[delta.index] = delta
        return []

    def _new_part(self, delta: Delta) -> ChatMessage:
        reasoning, content, calls = self._parsers[delta.index].parse(delta)
        is_empty = delta.finish_reason or self._has_tools or reasoning
        message: ChatMessage = {"content": content} if content or not is_empty else {}
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [{"index": number, **call} for number, call in joined(calls).items()]
        return message

    def _chunk(self, delta: Delta, message: ChatMessage) -> ChatChunk:
        if self._request.nvium.metadata:
            streamed = self._streamed[delta.index]
            streamed.tokens += delta.tokens
            streamed.text_offsets += delta.text_offsets
            if delta.finish_reason:
                message["nvium"] = self._token_exits(streamed)
        return self._chunk_of(delta, message)

    def _message(self, delta: Delta) -> ChatMessage:
        reasoning, content, calls = self._parsers[delta.index].parse(delta)
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._has_tools and (calls or not self._is_text_first):
            message["content"] = content or None
        if calls:
            message["tool_calls"] = [*joined(calls).values()]
        return message

    def _chunk_of(self, delta: Delta, message: ChatMessage) -> ChatChunk:
        choice: ChatChunkChoice = {**self._chat_choice(delta), "delta": message}
        return {**self._chunk_fields(), "object": CHUNK, "choices": [choice]}  # type: ignore[typeddict-item]

    def _chat_choice(self, delta: Delta) -> AnyChatChoice:
        fields = self._choice(delta, delta.index)
        fields["finish_reason"] = self._finish_reason(delta)
        return {**fields, "logprobs": self._logprobs(delta)}

    def _finish_reason(self, delta: Delta) -> AnswerEnd | None:
        return self._parsers[delta.index].finish_reason(delta)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        entries = chat_logprobs(self._service.vocabulary, delta.tokens, self._request.top_logprobs or 0)
        return {"content": entries, "refusal": None}

    def _prompt_token_ids(self) -> PromptTokenIds:
        """Return the prompt's token ids for the response's top level, because all choices share the prompt."""
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.choices[0].prompt.token_ids}


def joined(pieces: Sequence[CallPiece]) -> dict[int, MadeToolCall]:
    """Join the pieces of each call. Return the calls by number."""
    calls: dict[int, MadeToolCall] = {}
    for piece in pieces:
        call = calls.setdefault(piece.number, {"function": {"arguments": ""}})
        call["function"]["arguments"] += piece.arguments
        if piece.name:
            calls[piece.number] = {
                "id": piece.id,
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
    return calls
