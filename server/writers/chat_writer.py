"""The bodies of `/v1/chat/completions`, from the deltas of one request."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Literal

from nvium_core.text.tool_calls import CallPiece, ToolCallReader
from server.generation.generation import Delta, Generation
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
from server.schemas.generation import PromptTokenIds
from server.writers.logprobs import chat_logprobs
from server.writers.writer import Writer

CHUNK: Literal["chat.completion.chunk"] = "chat.completion.chunk"

NO_MORE: PromptTokenIds = {}


class ChatWriter(Writer):
    def __init__(self, service: Service, request: ChatRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._request = request
        self._vocabulary = service.vocabulary
        self._has_tools = bool(request.callable_tools())
        self._is_text_first = not self._has_tools or request.may_answer_in_text
        template, choices = service.chat_template, generation.choices
        self._thoughts = {choice: template.reasoning_reader(choice.prompt.token_ids) for choice in choices}
        self._readers = {choice: ToolCallReader(template.call_format) for choice in choices}

    def whole(self, gained: Sequence[Delta]) -> Chat:
        choices: list[ChatChoice] = [{"message": self._message(d), **self._chat_choice(d)} for d in gained]
        return {**self._whole(), "object": "chat.completion", "choices": choices, **self._prompt_token_ids()}

    def opening(self) -> Iterable[ChatChunk]:
        """A chunk for each choice that says who speaks."""
        for choice in self.generation.choices:
            message: ChatMessage = {"role": "assistant", "content": "" if self._is_text_first else None}
            yield self._chunk_of(Delta(choice), message, self._prompt_token_ids() if choice.index == 0 else {})

    def chunk(self, delta: Delta) -> ChatChunk:
        thought, said, calls = self._read(delta)
        is_empty = delta.finish_reason or self._has_tools or thought
        message: ChatMessage = {"content": said} if said or not is_empty else {}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [{"index": number, **call} for number, call in joined(calls).items()]
        return self._chunk_of(delta, message)

    def usage_chunk(self) -> ChatChunk:
        return {**self._usage_chunk(), "object": CHUNK, "choices": [], **NO_MORE}

    def _message(self, delta: Delta) -> ChatMessage:
        thought, said, calls = self._read(delta)
        message: ChatMessage = {"role": "assistant", "content": said, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if self._has_tools and (calls or not self._is_text_first):
            message["content"] = said or None
        if calls:
            message["tool_calls"] = [*joined(calls).values()]
        return message

    def _read(self, delta: Delta) -> tuple[str, str, list[CallPiece]]:
        """What is thought, the text that is content, and what is new of calls; of a call nothing before its name is
        whole."""
        thoughts, reader = self._thoughts[delta.choice], self._readers[delta.choice]
        thought, text = thoughts.push(delta.text)
        if delta.finish_reason:
            rest = thoughts.flush()
            thought, text = thought + rest.reasoning, text + rest.answer
        if not self._has_tools:
            return thought, text, []
        spoken = reader.push(text)
        held = reader.flush() if delta.finish_reason and self._is_text_first else ""
        return thought, spoken.content + held, spoken.calls

    def _chunk_of(self, delta: Delta, message: ChatMessage, more: PromptTokenIds = NO_MORE) -> ChatChunk:
        choice: ChatChunkChoice = {**self._chat_choice(delta), "delta": message}
        return {**self._chunk(), "object": CHUNK, "choices": [choice], **more}

    def _chat_choice(self, delta: Delta) -> AnyChatChoice:
        fields = self._choice(delta, delta.choice.index)
        if delta.finish_reason == "stop" and self._readers[delta.choice].is_complete:
            fields["finish_reason"] = "tool_calls"
        return {**fields, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        token_ids = [event.token_id for event in delta.tokens]
        scores = [event.score for event in delta.tokens]
        return chat_logprobs(self._vocabulary, token_ids, scores, self._request.top_logprobs or 0)

    def _prompt_token_ids(self) -> PromptTokenIds:
        """Told beside the choices, which have it in common."""
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.choices[0].prompt.token_ids}


def joined(pieces: Sequence[CallPiece]) -> dict[int, MadeToolCall]:
    """What is new of each call, by its number; the piece that brings a call's name gives it an id."""
    calls: dict[int, MadeToolCall] = {}
    for piece in pieces:
        call = calls.setdefault(piece.number, {"function": {"arguments": ""}})
        call["function"]["arguments"] += piece.arguments
        if piece.name:
            calls[piece.number] = {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
    return calls
