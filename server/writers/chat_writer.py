"""The bodies of `/v1/chat/completions`, from the deltas of one request."""

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from nvium_core.text.tool_calls import ToolCallReader
from server.generation.generation import Choice, Delta, Generation
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
        self._calls_tool = bool(request.callable_tools())
        self._readers: defaultdict[Choice, ToolCallReader] = defaultdict(ToolCallReader)

    def whole(self, gained: Sequence[Delta]) -> Chat:
        choices: list[ChatChoice] = [{"message": self._message(d), **self._chat_choice(d)} for d in gained]
        return {**self._whole(), "object": "chat.completion", "choices": choices, **self._prompt_token_ids()}

    def opening(self) -> Iterable[ChatChunk]:
        """A chunk for each choice that says who speaks."""
        for choice in self.generation.choices:
            message: ChatMessage = {"role": "assistant", "content": None if self._calls_tool else ""}
            yield self._chunk_of(Delta(choice), message, self._prompt_token_ids() if choice.index == 0 else {})

    def chunk(self, delta: Delta) -> ChatChunk:
        if self._calls_tool:
            return self._chunk_of(delta, self._call(delta, index=0))
        is_empty = delta.finish_reason and not delta.text
        return self._chunk_of(delta, {} if is_empty else {"content": delta.text})

    def usage_chunk(self) -> ChatChunk:
        return {**self._usage_chunk(), "object": CHUNK, "choices": [], **NO_MORE}

    def _message(self, delta: Delta) -> ChatMessage:
        if self._calls_tool:
            return {"role": "assistant", "content": None, "refusal": None, **self._call(delta)}
        return {"role": "assistant", "content": delta.text, "refusal": None}

    def _call(self, delta: Delta, index: int | None = None) -> ChatMessage:
        """The call, or what is new of it; there is none before its name is whole."""
        piece = self._readers[delta.choice].push(delta.text)
        if not piece.name and not piece.arguments:
            return {}
        call: MadeToolCall = {"function": {"arguments": piece.arguments}}
        if piece.name:
            call |= {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
            call["function"]["name"] = piece.name
        if index is not None:
            call["index"] = index
        return {"tool_calls": [call]}

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
