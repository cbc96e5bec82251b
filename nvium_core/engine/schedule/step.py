"""One call to the device and its outcome. Blocks count from 0."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence

NO_TOKEN = -1
"""Drawn from logits with NaN or infinities."""


class Run(NamedTuple):
    """One sequence's part of a Step: of block k the rows filled[k] … stop - 1, and at most `limit` tokens."""

    sequence: Sequence
    stop: int
    limit: int = 1

    @property
    def reaches_front(self) -> bool:
        return self.stop == self.sequence.num_tokens


class Rows(NamedTuple):
    """Rows of one sequence in one block."""

    sequence: Sequence
    rows: range


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of some sequences through these blocks.

    `whole`: every row passes all of them; else a run ends where its front emits. `seconds`: runs whose limit allows
    several tokens go on for about so long.
    """

    blocks: range
    runs: list[Run]
    whole: bool = False
    seconds: float = 0.0


class Emission(NamedTuple):
    """A token, the block behind which it was emitted, and log p_k of that exit."""

    token_id: int
    block: int
    log_p: float


class Outcome(NamedTuple):
    """Outcome of a run: how far each block has got, log Π (1 − w_j) of the front (0 if it has just emitted), tokens,
    scores of the rows that passed the last block. A run with an error has none of these."""

    filled: list[int]
    log_reached: float = 0.0
    emissions: Items[Emission] = ()
    scores: Items[Score] = ()
    error: Exception | None = None


class BlockReport(NamedTuple):
    """What one block did in a Step: how often it ran, its rows in all, and the seconds that took."""

    block: int
    num_steps: int
    num_rows: int
    seconds: float


class StepResult(NamedTuple):
    """Outcomes in the order of the Step's runs."""

    outcomes: list[Outcome]
    reports: list[BlockReport]
