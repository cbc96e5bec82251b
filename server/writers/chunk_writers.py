"""Writes the response bodies of `/v1/completions` and `/v1/chat/completions`, whole or in chunks."""

from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic_core import to_json

from nvium_core import Score, TokenEvent, best
from nvium_core.text.answer_parsers import CallPiece, ToolCallParser
from nvium_core.text.detokenizer import TokenBytes
from server.generation.choice import Choice, Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.chat import (
    AnyChatChoice,
    CalledFunction,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessage,
    ChatRequest,
    MadeToolCall,
    TokenLogprob,
    TopLogprob,
)
from server.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.schemas.generation import AnswerEnd, PromptTokenIds
from server.writers.writer import MIN_LOGPROB, ChunkWriter


class CompletionWriter(ChunkWriter[CompletionRequest]):
    chunk_object = "text_completion"

    def __init__(self, service: Service, request: CompletionRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._has_prompt: set[int] = set()
        """Choices whose prompt token ids have been written."""
        self._num_echoed: Counter[int] = Counter()
        """For each choice, the number of echoed prompt tokens whose scores have been written."""

    def response(self, deltas: Sequence[Delta]) -> Completion:
        """Write the best `n` choices of each prompt. The usage counts all choices, including those not returned."""
        per_prompt = self._request.num_choices
        groups = [deltas[first : first + per_prompt] for first in range(0, len(deltas), per_prompt)]
        chosen = [delta for group in groups for delta in best(group, self._request.n, scores_of)]
        choices = [self._completion_choice(delta, index) for index, delta in enumerate(chosen)]
        self._num_generated = sum(len(delta.tokens) for delta in deltas)
        return {**self._response_fields(), "object": "text_completion", "choices": choices}

    def _events(self, delta: Delta) -> list[bytes]:
        choices = [self._completion_choice(delta, delta.index)]
        return [to_json({**self._chunk_fields(), "object": "text_completion", "choices": choices})]

    def _completion_choice(self, delta: Delta, index: int) -> CompletionChoice:
        return {
            **self._choice(delta, index),
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            **self._prompt_token_ids(delta.index),
        }

    def _prompt_token_ids(self, index: int) -> PromptTokenIds:
        """Return the prompt's token ids, once for each choice."""
        if not self._request.return_token_ids or index in self._has_prompt:
            return {}
        self._has_prompt.add(index)
        return {"prompt_token_ids": self.generation.choices[index].prompt.token_ids}

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        token_ids = [event.token_id for event in delta.tokens]
        scores: list[Score | None] = [event.score for event in delta.tokens]
        offsets = delta.text_offsets
        if self._request.echo:
            choice, start = self.generation.choices[delta.index], self._num_echoed[delta.index]
            first: list[Score | None] = [] if start else [None]  # the first prompt token has no score
            echoed = [*first, *delta.prompt_scores]
            places = slice(start, start + len(echoed))
            self._num_echoed[delta.index] = places.stop
            token_ids = choice.prompt.token_ids[places] + token_ids
            offsets = (choice.prompt_offsets()[places] if echoed else []) + offsets
            scores = echoed + scores
        return {
            "tokens": [self._service.vocabulary.name(token_id) for token_id in token_ids],
            "token_logprobs": [None if score is None else max(score.logprob, MIN_LOGPROB) for score in scores],
            # a generator, because a long list would take much memory and pause all threads
            "top_logprobs": (
                None if score is None else self._alternatives(token_id, score)
                for token_id, score in zip(token_ids, scores, strict=True)
            ),
            "text_offset": offsets,
        }

    def _alternatives(self, token_id: int, score: Score) -> dict[str, float]:
        """Return the log-probabilities of the token and its alternatives by token name, in descending order."""
        by_id = dict(score.top[: self._request.logprobs])
        by_id.setdefault(token_id, score.logprob)
        names: dict[str, float] = {}
        for candidate, logprob in sorted(by_id.items(), key=lambda item: -item[1]):
            names.setdefault(self._service.vocabulary.name(candidate), max(logprob, MIN_LOGPROB))
        return names


def scores_of(delta: Delta) -> list[Score]:
    return [event.score for event in delta.tokens if event.score]


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

    def parse(self, delta: Delta) -> tuple[str, str, list[CallPiece]]:
        """Return the new reasoning, the new content and the new parts of calls."""
        reasoning, text = self.reasoning.push(delta.text)
        if delta.finish_reason:
            rest = self.reasoning.flush()
            reasoning, text = reasoning + rest.reasoning, text + rest.answer
        if self.calls is None:
            return reasoning, text, []
        content, pieces = self.calls.push(text)
        if delta.finish_reason and self.may_be_text:
            content += self.calls.flush()
        return reasoning, content, pieces

    def finish_reason(self, delta: Delta) -> AnswerEnd | None:
        has_called = self.calls is not None and self.calls.is_complete
        return "tool_calls" if delta.finish_reason == "stop" and has_called else delta.finish_reason


class ChatWriter(ChunkWriter[ChatRequest]):
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, request: ChatRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._parsers = [AnswerParser(service, request, choice) for choice in generation.choices]
        self._has_tools = self._parsers[0].calls is not None
        self._is_text_first = self._parsers[0].may_be_text
        self._streamed = [Delta(choice.index) for choice in generation.choices]
        """The tokens streamed so far, for each choice."""
        self._hidden: dict[int, Delta] = {}
        """Deltas without text, such as the syntax of a call. The choice's next chunk contains their tokens."""
        ids: PromptTokenIds = {"prompt_token_ids": generation.choices[0].prompt.token_ids}
        self._prompt_token_ids: PromptTokenIds = ids if request.return_token_ids else {}

    def response(self, deltas: Sequence[Delta]) -> Chat:
        choices: list[ChatChoice] = [
            {"message": self._message(delta, is_whole=True), **self._chat_choice(delta)} for delta in deltas
        ]
        return {**self._response_fields(), "object": "chat.completion", "choices": choices, **self._prompt_token_ids}

    def _opening(self) -> list[bytes]:
        message: ChatMessage = {"role": "assistant", "content": "" if self._is_text_first else None}
        first, *others = [self._chunk(Delta(choice.index), message) for choice in self.generation.choices]
        return [to_json({**first, **self._prompt_token_ids}), *map(to_json, others)]

    def _events(self, delta: Delta) -> list[bytes]:
        message = self._message(delta, is_whole=False)
        if hidden := self._hidden.pop(delta.index, None):
            hidden.extend(delta)
            delta = hidden
        if not (message or delta.finish_reason):
            self._hidden[delta.index] = delta
            return []
        if self._request.nvium.metadata:
            streamed = self._streamed[delta.index]
            streamed.tokens += delta.tokens
            streamed.text_offsets += delta.text_offsets
            if delta.finish_reason:
                message["nvium"] = self._token_exits(streamed)
        return [to_json(self._chunk(delta, message))]

    def _message(self, delta: Delta, *, is_whole: bool) -> ChatMessage:
        """Return the message of a whole response, or the new part of the message."""
        reasoning, content, calls = self._parsers[delta.index].parse(delta)
        message: ChatMessage = {}
        if is_whole:
            is_null = self._has_tools and not content and (calls or not self._is_text_first)
            message = {"role": "assistant", "content": None if is_null else content, "refusal": None}
        elif content or not (delta.finish_reason or self._has_tools or reasoning):
            message = {"content": content}
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            made = joined(calls)
            message["tool_calls"] = [*made.values()] if is_whole else [{"index": n, **made[n]} for n in made]
        return message

    def _chunk(self, delta: Delta, message: ChatMessage) -> ChatChunk:
        choice: ChatChunkChoice = {**self._chat_choice(delta), "delta": message}
        return {**self._chunk_fields(), "object": "chat.completion.chunk", "choices": [choice]}  # type: ignore[typeddict-item]

    def _chat_choice(self, delta: Delta) -> AnyChatChoice:
        fields = self._choice(delta, delta.index)
        fields["finish_reason"] = self._finish_reason(delta)
        entries = chat_logprobs(self._service.vocabulary, delta.tokens, self._request.top_logprobs or 0)
        return {**fields, "logprobs": {"content": entries, "refusal": None} if self._request.logprobs else None}

    def _finish_reason(self, delta: Delta) -> AnswerEnd | None:
        return self._parsers[delta.index].finish_reason(delta)


def joined(pieces: Sequence[CallPiece]) -> dict[int, MadeToolCall]:
    """Join the pieces of each call. Return the calls by number."""
    calls: dict[int, MadeToolCall] = {}
    for piece in pieces:
        if piece.name:
            function: CalledFunction = {"name": piece.name, "arguments": ""}
            calls[piece.number] = {"id": piece.id, "type": "function", "function": function}
        call = calls.setdefault(piece.number, {"function": {"arguments": ""}})
        call["function"]["arguments"] += piece.arguments
    return calls


def chat_logprobs(
    vocabulary: TokenBytes, tokens: Sequence[TokenEvent], num_alternatives: int
) -> Iterator[TokenLogprob]:
    """Yield log π_mix of each scored token, with alternatives: a long list would pause all threads."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        name, text = vocabulary.name(token_id), list(vocabulary[token_id])
        return {"token": name, "logprob": max(logprob, MIN_LOGPROB), "bytes": text}

    for token in tokens:
        if score := token.score:
            top = [entry(*other) for other in score.top[:num_alternatives]]
            yield {**entry(token.token_id, score.logprob), "top_logprobs": top}
