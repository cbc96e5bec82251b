"""How much sooner tokens come than block by block at full depth: from what Steps carried, and what blocks cost.

The dense schedule would carry the same rows. With n sequences that decode, each of its Steps has a row of each. For
what a Step of block k carried, or what was dropped with a sequence that ended before it was computed, it would pay

    r rows of emitted tokens           t_k(n) · r/n, that is r/n Steps
    prompts' rows                     t_k(rows): they take Steps of their own on either side
    prompts' rows while others decode what the Step cost, emitted rows included: both schedules piggyback them
    prompts' rows that were dropped   b_k each

Blocks cost what they do without their junctions, which are asked as often on either side. Torch-free.
"""

import math
from collections.abc import Collection
from collections.abc import Sequence as Items

from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step

MEMORY_SECONDS = 60.0
"""Busy time after which what was seen counts for 1/e."""


class PiggybackSpeedup:
    """Seconds the dense schedule would have taken over seconds spent, as a decaying average. Needs `costs`."""

    def __init__(self, *, max_rows_per_step: int) -> None:
        self.costs: StepCosts | None = None
        """Of blocks without junctions, in seconds."""
        self._max_rows = max_rows_per_step
        self._spent_seconds = self._dense_seconds = 0.0
        self._saved_seconds = 0.0
        """Not in the sums yet."""

    @property
    def ratio(self) -> float:
        """1 where nothing was gained; nan while nothing is known."""
        return self._dense_seconds / self._spent_seconds if self._spent_seconds else math.nan

    def begin(self, step: Step, running: Collection[Sequence]) -> None:
        """This Step is about to be run."""
        if self.costs is not None:
            self._saved_seconds += self._saved(self.costs, step, running)

    def end(self, seconds: float) -> None:
        """The Step took so long."""
        if self.costs is not None:
            kept = math.exp(-seconds / MEMORY_SECONDS)
            self._spent_seconds = kept * self._spent_seconds + seconds
            self._dense_seconds = kept * self._dense_seconds + seconds + self._saved_seconds
            self._saved_seconds = 0.0

    def take_back(self, sequence: Sequence, filled: Items[int], running: Collection[Sequence]) -> None:
        """Rows of wrong drafts, which the staircase had before: the dense schedule would not have run them."""
        if self.costs is not None:
            num_decoding = sum(num_emitted_tokens(other) > 0 for other in running)
            for block, (before, now) in enumerate(zip(filled, sequence.filled, strict=True)):
                self._saved_seconds -= self._of_tokens(self.costs, block, before - now, num_decoding)

    def drop(self, sequence: Sequence, running: Collection[Sequence]) -> None:
        """A running sequence leaves; its deferred rows are never computed."""
        num_emitted = num_emitted_tokens(sequence)
        if self.costs is not None and num_emitted > 1:  # the dense schedule too drops the row that emitted last
            num_decoding = sum(num_emitted_tokens(other) > 0 for other in running)
            for block, filled in enumerate(sequence.filled):
                rows = range(filled, sequence.num_tokens - 2)
                num_prefill_rows = len(rows[: max(0, sequence.num_prefill_rows - filled)])
                of_prompt = self.costs.per_row[block] * num_prefill_rows if num_prefill_rows else 0.0
                of_tokens = self._of_tokens(self.costs, block, len(rows) - num_prefill_rows, num_decoding)
                self._saved_seconds += of_prompt + of_tokens

    def _saved(self, costs: StepCosts, step: Step, running: Collection[Sequence]) -> float:
        """Seconds of the dense schedule for the Step's rows, beyond those of the Step; may be negative."""
        if is_dense(step, running):
            return 0.0
        emitted_rows = [num_emitted_rows(run) for run in step.runs]
        num_prefill_rows = step.num_rows - sum(emitted_rows)
        num_decoding = sum(is_past_prompt(sequence, step.block) for sequence in running)
        if num_prefill_rows and num_decoding:
            return 0.0
        num_decoding = num_decoding or sum(map(bool, emitted_rows))
        of_prompts = costs.seconds(step.block, num_prefill_rows) if num_prefill_rows else 0.0
        of_tokens = self._of_tokens(costs, step.block, sum(emitted_rows), num_decoding)
        return of_prompts + of_tokens - costs.seconds(step.block, step.num_rows)

    def _of_tokens(self, costs: StepCosts, block: int, num_rows: int, num_decoding: int) -> float:
        """Seconds of the dense schedule for so many rows of emitted tokens."""
        if not num_rows:
            return 0.0
        rows_per_step = min(num_decoding, self._max_rows)
        return num_rows / rows_per_step * costs.seconds(block, rows_per_step)


def num_emitted_tokens(sequence: Sequence) -> int:
    """Since it was last admitted: tokens emitted before that are recomputed like a prompt."""
    return sequence.num_tokens - sequence.num_prefill_rows


def is_past_prompt(sequence: Sequence, block: int) -> bool:
    """Its next row for the block, if any, is of an emitted token."""
    return len(sequence.token_ids) > sequence.num_prefill_rows <= sequence.filled[block]


def is_dense(step: Step, running: Collection[Sequence]) -> bool:
    """The dense schedule would run the same Step: a row of each sequence, all past their prompts."""
    one_each = step.num_rows == len(step.runs) == len(running)
    return one_each and False not in [is_past_prompt(sequence, step.block) for sequence in running]


def num_emitted_rows(run: Run) -> int:
    """Rows of tokens emitted since the sequence was admitted."""
    return max(0, run.rows.stop - max(run.rows.start, run.sequence.num_prefill_rows))
