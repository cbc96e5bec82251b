"""The interface of contenders. A contender is an engine that runs a model.

A contender generates the same number of tokens for every sequence, and ignores end-of-text. By default it samples at
temperature 1, without top-k or top-p.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from nvium_core.errors import NviumError


class NotAvailable(NviumError, RuntimeError):
    """A contender cannot run here. The message says why."""


class ContenderFailed(NviumError, RuntimeError):
    """A contender failed during a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a contender must generate: `num_tokens` tokens for each sequence, all with the same prompt."""

    prompt: list[int]
    num_sequences: int
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Length of a finished sequence, prompt included."""
        return len(self.prompt) + self.num_tokens

    def seeds(self, turn: int) -> range:
        """Return one seed per sequence. Different turns have different seeds."""
        return range(turn * self.num_sequences, (turn + 1) * self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The result of a turn. Each list has one entry per sequence. Times are in seconds since the turn's start.

    stolen_seconds, alone_seconds: what disturbed the turn, see `interference`.
    """

    seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    exits: list[list[int]] = field(default_factory=list)
    stolen_seconds: float = 0.0
    alone_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


Contender = Callable[[int], Generation]
"""Runs a workload once. Such a run is a *turn*. The argument is the turn's number."""
