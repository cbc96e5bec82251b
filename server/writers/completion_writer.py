"""Writes the response bodies of `/v1/completions`."""

from collections import Counter
from collections.abc import Sequence

from pydantic_core import to_json

from nvium_core import Score, best
from server.generation.choice import Delta
from server.generation.generation import Generation
from server.generation.service import Service
from server.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.schemas.generation import PromptTokenIds
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
        best: dict[str, float] = {}
        for candidate, logprob in sorted(by_id.items(), key=lambda item: -item[1]):
            best.setdefault(self._service.vocabulary.name(candidate), max(logprob, MIN_LOGPROB))
        return best


def scores_of(delta: Delta) -> list[Score]:
    return [event.score for event in delta.tokens if event.score]
