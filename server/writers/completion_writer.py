"""The bodies of `/v1/completions`, from the deltas of one request."""

from collections import Counter
from collections.abc import Sequence

from nvium_core import Score, best, mean_logprob
from server.generation.generation import Choice, Delta, Generation
from server.generation.service import Service
from server.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.schemas.generation import PromptTokenIds
from server.writers.logprobs import completion_logprobs
from server.writers.writer import Writer


class CompletionWriter(Writer):
    def __init__(self, service: Service, request: CompletionRequest, generation: Generation, response_id: str) -> None:
        super().__init__(service, request, generation, response_id)
        self._request = request
        self._vocabulary = service.vocabulary
        self._begun: set[Choice] = set()
        self._num_told: Counter[Choice] = Counter()
        """Tokens of the echoed prompt whose scores each choice has told."""

    def whole(self, gained: Sequence[Delta]) -> Completion:
        """The best n choices of each prompt; tokens of the others count as generated."""
        per_prompt = self._request.num_choices
        groups = [gained[first : first + per_prompt] for first in range(0, len(gained), per_prompt)]
        chosen = [delta for group in groups for delta in best(group, self._request.n, rank)]
        choices = [self._completion_choice(delta, index) for index, delta in enumerate(chosen)]
        self._num_generated = sum(len(delta.tokens) for delta in gained)
        return {**self._whole(), "object": "text_completion", "choices": choices}

    def chunk(self, delta: Delta) -> Completion:
        choices = [self._completion_choice(delta, delta.choice.index)]
        return {**self._chunk(), "object": "text_completion", "choices": choices}

    def usage_chunk(self) -> Completion:
        return {**self._usage_chunk(), "object": "text_completion", "choices": []}

    def _completion_choice(self, delta: Delta, index: int) -> CompletionChoice:
        return {
            **self._choice(delta, index),
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            **self._prompt_token_ids(delta.choice),
        }

    def _prompt_token_ids(self, choice: Choice) -> PromptTokenIds:
        """Told with the first that is told of a choice."""
        if not self._request.return_token_ids or choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"prompt_token_ids": choice.prompt.token_ids}

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        token_ids = [event.token_id for event in delta.tokens]
        scores: list[Score | None] = [event.score for event in delta.tokens]
        offsets = delta.text_offsets
        if self._request.echo:
            of_prompt = self._newly_told(delta)
            places = slice(self._num_told[delta.choice], self._num_told[delta.choice] + len(of_prompt))
            self._num_told[delta.choice] = places.stop
            token_ids = delta.choice.prompt.token_ids[places] + token_ids
            offsets = (delta.choice.text.prompt_offsets()[places] if of_prompt else []) + offsets
            scores = of_prompt + scores
        return completion_logprobs(self._vocabulary, token_ids, scores, offsets)

    def _newly_told(self, delta: Delta) -> list[Score | None]:
        """Scores of further tokens of the prompt; the first of all has none."""
        is_first = self._num_told[delta.choice] == 0
        return [None, *delta.prompt_scores] if is_first else [*delta.prompt_scores]


def rank(delta: Delta) -> float:
    """By which the choices of a prompt are compared."""
    return mean_logprob([event.score for event in delta.tokens if event.score])
