"""Checks requests on arrival, so that every admitted one can run to its end."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from numbers import Integral

from nvium_core.engine.params import ContextLengthExceeded, InvalidRequest, SamplingParams, require
from nvium_core.model.nvium import Nvium


@dataclass(frozen=True, slots=True)
class Limits:
    """`context` and `cache_tokens` are positions; `end_token_ids` the model's end-of-text."""

    context: int
    cache_tokens: int
    vocab_size: int
    end_token_ids: frozenset[int]

    def check(self, token_ids: Items[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest`, naming the field, if a request can never be served."""
        require(len(token_ids) > 0, "prompt", "must hold at least one token")
        num_positions = len(token_ids) + params.max_tokens
        if num_positions > self.context:
            raise ContextLengthExceeded(len(token_ids), params.max_tokens, self.context)
        self._check_vocabulary("prompt", token_ids)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        message = f"{num_positions} tokens are asked for in all, and the cache holds {self.cache_tokens}"
        field = "max_tokens" if len(token_ids) < self.cache_tokens else "prompt"
        require(num_positions <= self.cache_tokens, field, message)
        can_emit = params.min_tokens == 0 or len(self.stops(params)) < self.vocab_size
        require(can_emit, "min_tokens", "forbids every token, since all of them are stop tokens")
        is_something = params.max_tokens > 0 or len(token_ids) > 1
        require(is_something, "max_tokens", "must be at least 1: a prompt of one token has nothing to score")

    def stops(self, params: SamplingParams) -> frozenset[int]:
        """All tokens that end such a request."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_token_ids)

    def _check_vocabulary(self, field: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not (is_whole(token) and 0 <= token < self.vocab_size):
                raise InvalidRequest(field, f"token id {token!r} is outside the vocabulary of {self.vocab_size}")


def is_whole(token_id: object) -> bool:
    """An integer of any kind, NumPy's included; `int` is named because it is found much faster."""
    return isinstance(token_id, (int, Integral))


def eos_token_ids(model: Nvium) -> frozenset[int]:
    """End-of-text, as the model's generation configuration or else its configuration names it."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = model.config.eos_token_id if named is None else named
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
