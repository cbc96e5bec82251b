"""Puts the deltas of one request into OpenAI's bodies, whole or chunk by chunk, with the exits beside the text."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from nvium_core import TokenEvent, best, mean_logprob
from server.generation import Choice, Delta, FinishReason, Generation
from server.schemas import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    ExitSummary,
    StreamOptions,
    TokenExits,
    Usage,
)
from server.service import Service


class CompletionWriter:
    def __init__(
        self, service: Service, request: CompletionRequest, generation: Generation, *, completion_id: str
    ) -> None:
        self._request = request
        self._generation = generation
        self._exit_layers = service.exit_layers
        self._num_layers = service.num_layers
        self._envelope: dict[str, Any] = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }
        self._options = request.stream_options or StreamOptions()
        self._num_choices = request.best_of or request.n
        self._num_generated = 0
        self._exit_counts: Counter[int] = Counter()
        self._begun: set[Choice] = set()

    @property
    def wants_usage(self) -> bool:
        return self._options.include_usage

    async def whole(self) -> Completion:
        """The response once every choice has ended."""
        texts: defaultdict[Choice, str] = defaultdict(str)
        tokens: defaultdict[Choice, list[TokenEvent]] = defaultdict(list)
        reasons: dict[Choice, FinishReason | None] = {}
        async for delta in self._generation.deltas():
            texts[delta.choice] += delta.text
            tokens[delta.choice] += delta.tokens
            reasons[delta.choice] = delta.finish_reason
        self._num_generated = sum(map(len, tokens.values()))
        chosen = self._best(tokens)
        for index, choice in enumerate(chosen):
            choice.index = index
            self._count(tokens[choice])
        choices = [self._choice(c, texts[c], tokens[c], reasons[c]) for c in chosen]
        return Completion(**self._envelope, choices=choices, usage=self._usage(), **self._summary())

    def _best(self, tokens: dict[Choice, list[TokenEvent]]) -> list[Choice]:
        """The n choices of each prompt to answer with."""
        choices, per_prompt = self._generation.choices, self._num_choices
        groups = [choices[first : first + per_prompt] for first in range(0, len(choices), per_prompt)]
        scores = {choice: [event.score for event in events if event.score] for choice, events in tokens.items()}
        return [c for group in groups for c in best(group, self._request.n, lambda c: mean_logprob(scores[c]))]

    def chunk(self, delta: Delta) -> Completion:
        """The chunk for one delta; the last one of the request carries the summary."""
        self._num_generated += len(delta.tokens)
        self._count(delta.tokens)
        choice = self._choice(delta.choice, delta.text, delta.tokens, delta.finish_reason)
        summary = self._summary() if self._generation.is_finished else {}
        return Completion(**self._envelope, choices=[choice], **self._chunk_usage(), **summary)

    def usage_chunk(self) -> Completion:
        """The chunk after the last, without choices."""
        return Completion(**self._envelope, choices=[], usage=self._usage())

    def _count(self, tokens: Sequence[TokenEvent]) -> None:
        self._exit_counts.update(event.exit for event in tokens)

    def _choice(
        self, choice: Choice, text: str, tokens: Sequence[TokenEvent], finish_reason: FinishReason | None
    ) -> CompletionChoice:
        extras: dict[str, Any] = {}
        if self._request.nvium.metadata:
            extras["nvium"] = self._token_exits(tokens)
        if self._request.return_token_ids:
            extras["token_ids"] = [event.token_id for event in tokens]
            if choice not in self._begun:
                extras["prompt_token_ids"] = choice.prompt.token_ids
        self._begun.add(choice)
        return CompletionChoice(index=choice.index, text=text, logprobs=None, finish_reason=finish_reason, **extras)

    def _token_exits(self, tokens: Sequence[TokenEvent]) -> TokenExits:
        return TokenExits(
            token_ids=[event.token_id for event in tokens],
            exits=[event.exit for event in tokens],
            exit_layers=[self._exit_layers[event.exit - 1] for event in tokens],
            exit_probabilities=[event.exit_probability for event in tokens],
        )

    def _summary(self) -> dict[str, Any]:
        if not self._request.nvium.metadata:
            return {}
        counts = [self._exit_counts[number] for number, _ in enumerate(self._exit_layers, start=1)]
        layers_run: int = sum(count * depth for count, depth in zip(counts, self._exit_layers, strict=True))
        mean_depth = layers_run / (sum(counts) * self._num_layers)
        return {"nvium": ExitSummary(exit_counts=counts, mean_depth=mean_depth)}

    def _usage(self) -> Usage:
        """Every prompt is counted once, however many choices it has; of the tokens, also those not answered with."""
        num_prompt = sum(len(choice.prompt.token_ids) for choice in self._generation.choices[:: self._num_choices])
        num_generated = self._num_generated
        return Usage(prompt_tokens=num_prompt, completion_tokens=num_generated, total_tokens=num_prompt + num_generated)

    def _chunk_usage(self) -> dict[str, Any]:
        if self._options.continuous_usage_stats:
            return {"usage": self._usage()}
        return {"usage": None} if self.wants_usage else {}
