"""A Step and what came of it. Blocks count from 0."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence

NO_TOKEN = -1
"""Drawn where the distribution is not one, because the model produced NaN or infinities."""


class Run(NamedTuple):
    """One sequence's part of a Step: a prefix of its pending rows.

    `reaches_front`: the front row is among them, so it is routed afterwards.
    """

    sequence: Sequence
    rows: range
    reaches_front: bool


@dataclass(frozen=True)
class Step:
    """One block for some sequences.

    `following` is a Step that may be run at once, without coming back to the scheduler: if a front goes on, or if
    `goes_on_anyway` in any case. It has the same sequences; those that have spoken are not routed again.
    """

    block: int
    runs: list[Run]
    following: "Step | None" = None
    goes_on_anyway: bool = False

    @cached_property
    def num_rows(self) -> int:
        return sum([len(run.rows) for run in self.runs])


class FrontDecision(NamedTuple):
    """What a front row did behind a block: the token it emitted, None if it goes on, and log w of either."""

    token_id: int | None
    log_exit: float
    log_continue: float


@dataclass(slots=True)
class StepResult:
    """What came of a Step: a decision for every front it reached, and scores of rows that were to be scored.

    A sequence in `errors` failed alone. `seconds` is None where nobody measured.
    """

    step: Step
    decisions: dict[Sequence, FrontDecision] = field(default_factory=dict)
    scores: dict[Sequence, list[Score]] = field(default_factory=dict)
    errors: dict[Sequence, Exception] = field(default_factory=dict)
    seconds: float | None = None
