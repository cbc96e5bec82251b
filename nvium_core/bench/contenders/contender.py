"""The interface of a contender.

Every sequence has the same number of tokens, sampled at temperature 1 without truncation, ignoring end-of-text.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from nvium_core.errors import NviumError


class NotAvailable(NviumError, RuntimeError):
    """A contender that cannot run here. The message says why, and how to enable it."""


class ContenderFailed(NviumError, RuntimeError):
    """A contender that failed during a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The workload: sequences with the same prompt and different seeds."""

    prompt: list[int]
    num_sequences: int
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Length of a sequence at its end."""
        return len(self.prompt) + self.num_tokens

    def seeds(self, turn: int) -> range:
        """Return a seed for each sequence, different in every turn."""
        return range(turn * self.num_sequences, (turn + 1) * self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The result of a turn, with an entry for each sequence. Times are in seconds since the turn's start."""

    seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    exits: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


Contender = Callable[[int], Generation]
"""Generates one turn, given its number."""
