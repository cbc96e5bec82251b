"""The bodies of `/v1/chat/completions`, from the deltas of one request."""

from collections.abc import Iterable, Sequence
from typing import Any

from server.generation import Delta, Generation
from server.logprobs import chat_logprobs
from server.schemas.chat import Chat, ChatChoice, ChatChunk, ChatChunkChoice, ChatLogprobs, ChatMessage, ChatRequest
from server.service import Service
from server.writer import Writer


class ChatWriter(Writer):
    def __init__(self, service: Service, request: ChatRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._request = request
        self._vocabulary = service.vocabulary

    def whole(self, gained: Sequence[Delta]) -> Chat:
        choices = [ChatChoice(message=self._message(delta), **self._chat_choice(delta)) for delta in gained]
        return Chat(object="chat.completion", choices=choices, **self._whole(), **self._prompt_token_ids())

    def opening(self) -> Iterable[ChatChunk]:
        """A chunk for each choice that says who speaks."""
        for choice in self.generation.choices:
            more = self._prompt_token_ids() if choice.index == 0 else {}
            yield self._chunk_of(Delta(choice), ChatMessage(role="assistant", content=""), **more)

    def chunk(self, delta: Delta) -> ChatChunk:
        is_empty = delta.finish_reason and not delta.text
        return self._chunk_of(delta, ChatMessage() if is_empty else ChatMessage(content=delta.text))

    def usage_chunk(self) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=[], **self._usage_chunk())

    def _message(self, delta: Delta) -> ChatMessage:
        return ChatMessage(role="assistant", content=delta.text, refusal=None)

    def _chunk_of(self, delta: Delta, message: ChatMessage, **more: Any) -> ChatChunk:
        choice = ChatChunkChoice(delta=message, **self._chat_choice(delta))
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self._chunk(), **more)

    def _chat_choice(self, delta: Delta) -> dict[str, Any]:
        return {**self._choice(delta, delta.choice.index), "logprobs": self._logprobs(delta)}

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
