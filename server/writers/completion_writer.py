"""Writes the response bodies of `/v1/completions`."""

from collections import Counter
from collections.abc import Sequence

from pydantic_core import to_json

from nvium_core import Score, best, mean_logprob
from server.generation.delta import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.schemas.generation import PromptTokenIds
from server.writers.chunk_writer import ChunkWriter
from server.writers.logprobs import completion_logprobs


class CompletionWriter(ChunkWriter):
    def __init__(self, service: Service, request: CompletionRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._request = request
        self._has_prompt: set[int] = set()
        """Choices whose prompt token ids are written."""
        self._num_echoed: Counter[int] = Counter()
        """Number of echoed prompt tokens whose scores are written, by choice."""

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Write the best `n` choices of each prompt. The usage counts the tokens of all choices."""
        per_prompt = self._request.num_choices
        groups = [deltas[first : first + per_prompt] for first in range(0, len(deltas), per_prompt)]
        chosen = [delta for group in groups for delta in best(group, self._request.n, rank)]
        choices = [self._completion_choice(delta, index) for index, delta in enumerate(chosen)]
        self._num_generated = sum(len(delta.tokens) for delta in deltas)
        response: Completion = {**self._whole_fields(), "object": "text_completion", "choices": choices}
        return to_json(response)

    def _chunk(self, delta: Delta) -> Completion:
        choices = [self._completion_choice(delta, delta.index)]
        return {**self._chunk_fields(), "object": "text_completion", "choices": choices}

    def _usage_chunk(self) -> Completion:
        return {**self._usage_fields(), "object": "text_completion", "choices": []}

    def _completion_choice(self, delta: Delta, index: int) -> CompletionChoice:
        return {
            **self._choice(delta, index),
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            **self._prompt_logprobs(delta),
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
            choice, echoed = self.generation.choices[delta.index], self._newly_scored(delta)
            places = slice(self._num_echoed[delta.index], self._num_echoed[delta.index] + len(echoed))
            self._num_echoed[delta.index] = places.stop
            token_ids = choice.prompt.token_ids[places] + token_ids
            offsets = (choice.text.prompt_offsets()[places] if echoed else []) + offsets
            scores = echoed + scores
        return completion_logprobs(self._vocabulary, token_ids, scores, offsets, self._request.logprobs)

    def _newly_scored(self, delta: Delta) -> list[Score | None]:
        """Return the new prompt scores of a delta. The first prompt token has no score."""
        is_first = self._num_echoed[delta.index] == 0
        return [None, *delta.prompt_scores] if is_first else [*delta.prompt_scores]


def rank(delta: Delta) -> float:
    return mean_logprob([event.score for event in delta.tokens if event.score])
