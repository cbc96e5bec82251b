"""The interface of a contender: the same number of tokens for every sequence, sampled at temperature 1 without
truncation, end-of-text ignored."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from nvium_core.errors import NviumError


class NotAvailable(NviumError, RuntimeError):
    """The contender cannot run here; the message says why and what would help."""


class ContenderFailed(NviumError, RuntimeError):
    """The contender failed during a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """All sequences have this prompt and different seeds."""

    prompt: list[int]
    num_sequences: int
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Positions of one sequence at its end."""
        return len(self.prompt) + self.num_tokens

    def seeds(self, turn: int) -> range:
        """A seed for each sequence, different in every turn."""
        return range(turn * self.num_sequences, (turn + 1) * self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The result of a turn. Times are in seconds since its start; lists have an entry for each sequence. `exits` count
    from 1; empty for a model with one exit."""

    seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    exits: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


Contender = Callable[[int], Generation]
"""Called with the turn's number."""
