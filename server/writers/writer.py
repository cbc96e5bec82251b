"""Puts the deltas of one request into OpenAI's bodies, whole or chunk by chunk, with the exits beside the text."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from server.generation.generation import Delta, Generation
from server.generation.service import Service
from server.schemas.generation import (
    Generated,
    GeneratedChoice,
    GenerationRequest,
    StreamOptions,
    TokenExits,
    Usage,
)


class Writer(ABC):
    """What both endpoints have in common. A subclass says what a choice and the response around it look like."""

    def __init__(self, service: Service, request: GenerationRequest, generation: Generation, response_id: str) -> None:
        self.generation = generation
        self._options = request.stream_options or StreamOptions()
        self._tells_exits = request.nvium.metadata
        self._tells_offsets = request.nvium.text_offsets
        self._tells_token_ids = request.return_token_ids
        self._num_choices = request.num_choices
        self._exit_layers = service.exit_layers
        self._num_layers = service.num_layers
        self._num_generated = 0
        self._exit_counts: Counter[int] = Counter()
        self._num_ended = 0
        self._envelope: Generated = {
            "id": response_id,
            "created": int(time.time()),
            "model": service.check_model(request.model),
            "system_fingerprint": service.fingerprint,
        }
        if request.metadata is not None:
            self._envelope["metadata"] = request.metadata

    @abstractmethod
    def whole(self, gained: Sequence[Delta]) -> Generated:
        """The response, from what each choice gained in all."""

    @abstractmethod
    def chunk(self, delta: Delta) -> Generated:
        """The chunk for one delta; the last one of the request carries the summary."""

    def chunks(self, delta: Delta) -> Iterable[Any]:
        """What a stream tells of one delta."""
        return (self.chunk(delta),)

    @abstractmethod
    def usage_chunk(self) -> Generated:
        """The chunk after the last, without choices."""

    def opening(self) -> Iterable[Generated]:
        """Chunks before any token."""
        return ()

    def closing(self) -> Iterable[Generated]:
        """Chunks after the last delta."""
        return (self.usage_chunk(),) if self._options.include_usage else ()

    def _choice(self, delta: Delta, index: int) -> GeneratedChoice:
        """Fields of any choice; its tokens count from here on."""
        self._num_generated += len(delta.tokens)
        for event in delta.tokens:
            self._exit_counts[event.exit] += 1
        self._num_ended += delta.finish_reason is not None
        fields: GeneratedChoice = {"index": index, "finish_reason": delta.finish_reason}
        if delta.finish_reason:
            fields["stop_reason"] = delta.stop_reason
        if self._tells_exits:
            fields["nvium"] = self._token_exits(delta)
        if self._tells_token_ids:
            fields["token_ids"] = [event.token_id for event in delta.tokens]
        return fields

    def _whole(self) -> Generated:
        """Fields of any whole response, once its choices are written."""
        return self._summed_up({**self._envelope, "usage": self._usage()})

    def _chunk(self) -> Generated:
        """Fields of any chunk with choices, once they are written."""
        fields = self._envelope.copy()
        if self._options.continuous_usage_stats:
            fields["usage"] = self._usage()
        elif self._options.include_usage:
            fields["usage"] = None
        return self._summed_up(fields) if self._num_ended == len(self.generation.choices) else fields

    def _usage_chunk(self) -> Generated:
        return {**self._envelope, "usage": self._usage()}

    def _token_exits(self, delta: Delta) -> TokenExits:
        told: TokenExits = {
            "token_ids": [event.token_id for event in delta.tokens],
            "exits": [event.exit for event in delta.tokens],
            "exit_layers": [self._exit_layers[event.exit - 1] for event in delta.tokens],
            "exit_probabilities": [event.exit_probability for event in delta.tokens],
        }
        if self._tells_offsets:
            told["text_offsets"] = delta.text_offsets
        return told

    def _summed_up(self, fields: Generated) -> Generated:
        """With what is told once of a whole request."""
        if self._tells_exits:
            counts = [self._exit_counts[number] for number, _ in enumerate(self._exit_layers, start=1)]
            layers_run: int = sum(count * depth for count, depth in zip(counts, self._exit_layers, strict=True))
            mean_depth = layers_run / (max(1, sum(counts)) * self._num_layers)
            fields["nvium"] = {"exit_counts": counts, "mean_depth": mean_depth}
        return fields

    def _usage(self) -> Usage:
        """Every prompt is counted once, however many choices it has; of the tokens, also those not answered with."""
        leaders = self.generation.choices[:: self._num_choices]
        num_prompt, num_generated = sum(len(choice.prompt.token_ids) for choice in leaders), self._num_generated
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in leaders)},
        }
