"""A Step, which is one call to the device, and its outcome. Blocks count from 0."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from nvium_core.engine.events import Score, StepReport
from nvium_core.engine.schedule.policies import SWEEP, Policy
from nvium_core.engine.schedule.sequence import Sequence

NO_TOKEN = -1  # result of sampling if the logits have NaN or infinities

MAX_SHORT_RUN_ROWS = 16
"""A run of more rows, such as a prompt, is *long*."""


class Run(NamedTuple):
    """One sequence's part of a Step: rows filled[k] … stop - 1 of each block k.

    In a tied Step, block k has only rows that earlier Steps have passed through block k - 1. So the blocks have
    different rows, and a row moves by at most one block.
    """

    sequence: Sequence
    stop: int

    def rows(self, block: int, filled: Items[int], *, is_tied: bool) -> range:
        """Return the rows of a block, possibly none. `filled`: the staircase before the Step or, if not tied, now."""
        return range(filled[block], min(self.stop, filled[block - 1]) if is_tied and block else self.stop)

    @property
    def reaches_front(self) -> bool:
        return self.stop == self.sequence.num_tokens


class Rows(NamedTuple):
    """Consecutive rows of one sequence."""

    sequence: Sequence
    rows: range


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of some sequences to run through these blocks, in the passes of a policy.

    A run ends with the pass in which its front row emits its last token, of at most `limit`. After `seconds`, no run
    starts another token. `async_rows`: the rows of the next Step, which a backend may run before it returns this
    Step's outcomes. A row behind the last known token takes the token that its sequence emits in this Step.
    `is_typical`: whether tuners count the Step.
    """

    blocks: range
    runs: list[Run]
    policy: Policy = SWEEP
    limit: int = 1
    seconds: float = 0.0
    async_rows: Items[Rows] = ()
    is_typical: bool = True


class Emission(NamedTuple):
    """An emitted token, its exit (0-based) and log p_k of that exit."""

    token_id: int
    block: int
    log_p: float


@dataclass(slots=True)
class Outcome:
    """Outcome of a run. If `error` is set, the other fields are meaningless.

    `filled`: the new staircase. `log_reached`: log Π (1 − w_j) over the exits that the front row has passed; 0 if it
    has just emitted. `scores`: scores of the rows that have passed the last block in this Step.
    """

    filled: list[int]
    log_reached: float = 0.0
    emissions: list[Emission] = field(default_factory=list)
    scores: Items[Score] = ()
    error: Exception | None = None


class StepResult(NamedTuple):
    """Outcomes in the order of the Step's runs."""

    outcomes: list[Outcome]
    reports: list[StepReport]
