"""What contenders are asked, and what they answer: the same number of tokens for every sequence, each drawn at
temperature 1 from the whole distribution, end-of-text ignored."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from nvium_core.errors import NviumError


class NotAvailable(NviumError, RuntimeError):
    """A contender that cannot take part; the message says why, and what would help."""


class ContenderFailed(NviumError, RuntimeError):
    """A contender that took part and gave up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """All sequences have this prompt and draws of their own."""

    prompt: list[int]
    num_sequences: int
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Of one sequence, at its end."""
        return len(self.prompt) + self.num_tokens

    def seeds(self, turn: int) -> range:
        """One for each sequence, those of every turn anew."""
        return range(turn * self.num_sequences, (turn + 1) * self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spoken:
    """A turn. Times are in seconds since it began; each list has an entry for each sequence. `exits` count from 1 and
    are of models that have several."""

    seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    exits: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


Contender = Callable[[int], Spoken]
"""Takes a turn, given its number."""
