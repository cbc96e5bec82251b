"""The bodies of `/v1/chat/completions`, from the deltas of one request."""

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from server.generation import Choice, Delta, Generation
from server.logprobs import chat_logprobs
from server.schemas.chat import (
    CalledFunction,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    MadeToolCall,
)
from server.service import Service
from server.tool_calls import ToolCallReader
from server.writer import Writer


class ChatWriter(Writer):
    def __init__(self, service: Service, request: ChatRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._request = request
        self._vocabulary = service.vocabulary
        self._calls_tool = bool(request.callable_tools())
        self._readers: defaultdict[Choice, ToolCallReader] = defaultdict(ToolCallReader)

    def whole(self, gained: Sequence[Delta]) -> Chat:
        choices = [ChatChoice(message=self._message(delta), **self._chat_choice(delta)) for delta in gained]
        return Chat(object="chat.completion", choices=choices, **self._whole(), **self._prompt_token_ids())

    def opening(self) -> Iterable[ChatChunk]:
        """A chunk for each choice that says who speaks."""
        for choice in self.generation.choices:
            more = self._prompt_token_ids() if choice.index == 0 else {}
            message = ChatMessage(role="assistant", content=None if self._calls_tool else "")
            yield self._chunk_of(Delta(choice), message, **more)

    def chunk(self, delta: Delta) -> ChatChunk:
        if self._calls_tool:
            return self._chunk_of(delta, ChatMessage(**self._tool_calls(delta, index=0)))
        is_empty = delta.finish_reason and not delta.text
        return self._chunk_of(delta, ChatMessage() if is_empty else ChatMessage(content=delta.text))

    def usage_chunk(self) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=[], **self._usage_chunk())

    def _message(self, delta: Delta) -> ChatMessage:
        if self._calls_tool:
            return ChatMessage(role="assistant", content=None, refusal=None, **self._tool_calls(delta))
        return ChatMessage(role="assistant", content=delta.text, refusal=None)

    def _tool_calls(self, delta: Delta, **more: Any) -> dict[str, Any]:
        """The call, or what is new of it; there is none before its name is whole."""
        piece = self._readers[delta.choice].push(delta.text)
        if piece.name:
            function = CalledFunction(name=piece.name, arguments=piece.arguments)
            call = MadeToolCall(id=f"call_{uuid.uuid4().hex}", type="function", function=function, **more)
        elif piece.arguments:
            call = MadeToolCall(function=CalledFunction(arguments=piece.arguments), **more)
        else:
            return {}
        return {"tool_calls": [call]}

    def _chunk_of(self, delta: Delta, message: ChatMessage, **more: Any) -> ChatChunk:
        choice = ChatChunkChoice(delta=message, **self._chat_choice(delta))
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._chunk(), **more)

    def _chat_choice(self, delta: Delta) -> dict[str, Any]:
        fields = self._choice(delta, delta.choice.index)
        if delta.finish_reason == "stop" and self._readers[delta.choice].is_complete:
            fields["finish_reason"] = "tool_calls"
        return fields | {"logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        token_ids = [event.token_id for event in delta.tokens]
        scores = [event.score for event in delta.tokens]
        return chat_logprobs(self._vocabulary, token_ids, scores, self._request.top_logprobs or 0)

    def _prompt_token_ids(self) -> dict[str, Any]:
        """Beside the choices, which have it in common."""
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.choices[0].prompt.token_ids}
