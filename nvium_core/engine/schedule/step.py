"""A Step and what came of it. Blocks count from 0."""

import math
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence

NO_TOKEN = -1
"""Drawn where the distribution is not one, because the model produced NaN or infinities."""


class Run(NamedTuple):
    """One sequence's part of a Step: a prefix of its pending rows.

    `reaches_front`: the front row is among them, so it is routed afterwards. Of a sequence that samples from the
    original: a token is to be drafted behind the front row, or the last exit is to say what follows some of the rows.
    """

    sequence: Sequence
    rows: range
    reaches_front: bool


REACHES_FRONT = attrgetter("reaches_front")


@dataclass(slots=True, eq=False)
class Step:
    """One block for some sequences.

    `following` is a Step of a later block for the same sequences, to run without coming back to the scheduler: it may
    run if a lone sequence's front goes on; it must if `goes_on_anyway`, which makes it and this one parts of a *pass*.
    Fronts that have emitted are not routed again. Steps with the same rows share their list of runs.
    """

    block: int
    runs: list[Run]
    following: "Step | None" = None
    goes_on_anyway: bool = False
    num_drafts: int = 0
    """Tokens that the drafter drafts behind each that the last exit says here, at most."""
    repeats: bool = False
    """The first of a pass of the running sequences of the pass before, in its order: of each the row of the token that
    it emitted then, in the same pages or new ones behind them."""
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        known = self.following
        self.num_rows = (
            known.num_rows if known and known.runs is self.runs else sum([len(run.rows) for run in self.runs])
        )

    @property
    def last(self) -> "Step":
        """Of those that may run without coming back to the scheduler."""
        step = self
        while step.following is not None:
            step = step.following
        return step

    def after(self, num_steps: int) -> "Step | None":
        """What is left of a pass after so many of its Steps."""
        step: Step | None = self
        for _ in range(num_steps):
            step = step.following if step is not None and step.goes_on_anyway else None
        return step

    def without_fronts(self, sequences: Collection[Sequence]) -> "Step":
        """The same rows, without routing the fronts of these sequences, here or later."""
        if not sequences:
            return self
        following = self.following and self.following.without_fronts(sequences)
        runs = [
            run._replace(reaches_front=False) if run.reaches_front and run.sequence in sequences else run
            for run in self.runs
        ]
        return replace(self, runs=runs, following=following)


class FrontDecision(NamedTuple):
    """What a front row did behind a block: the token it emitted, None if it goes on, and log w of either."""

    token_id: int | None
    log_exit: float
    log_continue: float


GOES_ON = FrontDecision(None, -math.inf, 0.0)


def certain(token_id: int) -> FrontDecision:
    """An exit that nothing goes on from."""
    return FrontDecision(token_id, 0.0, -math.inf)


@dataclass(slots=True)
class StepResult:
    """What came of a Step: a decision for every front that was asked, and scores of rows that were to be scored.

    Of Steps that ran in one call, a front may have a decision only with the last one that asked it: `log_exit` and
    `log_continue` then start where it stood before the first. The others count it as going on.

    `verified`: the last exit's tokens behind the first rows that were to be verified, of those that sample from the
    original. A sequence in `errors` failed alone. `seconds` is None if not measured; those of routers and heads are a
    part of it, 0 unless the backend decided for fronts itself and timed that. `is_complete`: no front that was reached
    is still to be asked.
    """

    step: Step
    decisions: dict[Sequence, FrontDecision] = field(default_factory=dict)
    scores: dict[Sequence, list[Score]] = field(default_factory=dict)
    errors: dict[Sequence, Exception] = field(default_factory=dict)
    seconds: float | None = None
    router_seconds: float = 0.0
    head_seconds: float = 0.0
    is_complete: bool = False
    num_going_on: int = 0
    """Fronts that went on to the next Step of the call, without a decision here."""
    verified: dict[Sequence, list[int]] = field(default_factory=dict)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Of the drafter, behind the verified ones."""

    @property
    def num_asked(self) -> int:
        return len(self.decisions) + self.num_going_on

    @property
    def num_left(self) -> int:
        """Fronts that have emitted."""
        return len([decision for decision in self.decisions.values() if decision.token_id is not None])


def decide_together(
    results: list[StepResult], fronts: Items[Sequence], outcomes: Iterable[tuple[int, int, float, float]]
) -> None:
    """Note what became of fronts that were asked behind each Step of a call until they emitted: of each, the block it
    was asked behind last, its token there, below `NO_TOKEN` if it goes on, and log w of exiting and of going on."""
    decisions, first = [result.decisions for result in results], results[0].step.block
    for sequence, (block, token, log_exit, log_continue) in zip(fronts, outcomes, strict=True):
        emitted = None if token < NO_TOKEN else token
        decisions[block - first][sequence] = FrontDecision(emitted, log_exit, log_continue)
    num_left = len(fronts)
    for result in results:
        num_left -= len(result.decisions)
        result.num_going_on = num_left
