"""Batching: the choice of every Step. Torch-free.

A run of many rows, such as a prompt, is *long*. Long runs would delay short runs. So if both kinds wait, Steps of long
runs and Steps of short runs alternate, and a Step of long runs has a smaller row budget.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter

from nvium_core.engine.config import Bounds, EngineConfig
from nvium_core.engine.schedule.admission import Admission
from nvium_core.engine.schedule.drafting import Drafting
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import (
    MAX_SHORT_RUN_ROWS,
    NO_TOKEN,
    WHOLE,
    Policy,
    Rows,
    Run,
    Step,
    likely_fastest,
    policies_of,
)
from nvium_core.engine.schedule.tuner import Tuner

MULTI_STEP_SECONDS = 0.004
"""Time budget of a Step that emits several tokens per sequence. It is short, for smooth streaming and low latency."""


class Scheduler:
    """Chooses which running sequences take part in the next Step, with which rows and blocks."""

    def __init__(
        self,
        admission: Admission,
        config: EngineConfig,
        *,
        num_blocks: int,
        num_multi_steps: int = 0,
        async_scheduling: bool = False,
        bounds: Bounds | None = None,
        is_tied: bool = False,
    ) -> None:
        """`num_multi_steps`, `async_scheduling`: see `Backend`. `is_tied`: whether the blocks share their weights."""
        self.admission = admission
        self.config = config
        self.num_blocks = num_blocks
        self.num_multi_steps = num_multi_steps
        self.async_scheduling = async_scheduling
        self.is_tied = is_tied
        self.bounds = bounds or config.bounds()
        policies = policies_of(config.schedule, num_blocks, is_tied=is_tied)
        self.schedules: Tuner[Policy] = Tuner(policies, partial(likely_fastest, policies))
        self.drafts = Drafting(config.max_drafts)
        self._pool, self._running = admission.pool, admission.running
        self._num_steps = self._num_running = 0
        self._policy, self._passes = WHOLE, dict[int, range]()
        """The last Step's policy, and its passes by their first block."""
        self._async_rows: list[Rows] = []
        """`Step.async_rows` of the last Step."""
        self._long_ran = False
        self._budget = self.bounds.step
        """Maximum rows of the next Step."""

    def schedule(self) -> Step | None:
        """Return the next Step, or None if no sequence can run."""
        for sequence in self.admission.admit():
            sequence.last_step = self._num_steps
        scheduled, self._async_rows = self._async_rows, []
        while ready := [sequence for sequence in self._running if not sequence.awaits_constraint]:
            self._num_running = len(self._running)
            is_forced = not all(sequence.params.early_exits for sequence in self._running)
            policy = self.schedules.choose(self._num_running)
            self._policy = WHOLE if is_forced else policy
            self._passes = {blocks.start: blocks for blocks in self._policy.passes(range(self.num_blocks))}
            if step := self._step_of_rows(scheduled) or self._step(ready):
                self._num_steps += 1
                for run in step.runs:
                    run.sequence.last_step = self._num_steps
                self._async_rows = self._rows_after(step)
                return replace(step, async_rows=self._async_rows, is_typical=not (self._long_ran or is_forced))
        return None

    def observe(self, step: Step, num_tokens: int, seconds: float) -> None:
        """Record a Step for the tuners of schedules and draft limits, unless it had long runs or a forced policy."""
        if step.is_typical:
            self.schedules.observe(self._num_running, num_tokens, seconds)
            if any(run.sequence.is_original for run in step.runs):
                self.drafts.tuner.observe(self._num_running, num_tokens, seconds)

    def _turn(self, ready: dict[Sequence, int]) -> list[Sequence]:
        """Return the sequences for the next Step: all with long runs, or all with short runs, by their last Step.

        The two kinds alternate, unless a sequence is overdue. Long runs that are not overdue are sorted by arrival.
        """
        long = {sequence for sequence in ready if self._is_long(sequence, ready[sequence])}
        is_mixed = 0 < len(long) < len(ready)
        longest_waiting = min(ready, key=attrgetter("last_step"))
        is_due = longest_waiting in long if self._is_overdue(longest_waiting) else not self._long_ran
        self._long_ran = is_due if is_mixed else bool(long)
        self._budget = min(self.bounds) if is_mixed and self._long_ran else self.bounds.step
        turn = [sequence for sequence in ready if (sequence in long) == self._long_ran]
        turn.sort(key=attrgetter("last_step"))
        if self._long_ran:
            turn.sort(key=lambda sequence: 0 if self._is_overdue(sequence) else 1 + sequence.arrival)
        return turn

    def _is_long(self, sequence: Sequence, block: int) -> bool:
        blocks = self._passes[block]
        return sequence.pending_rows(block).stop - sequence.filled[blocks[-1]] > MAX_SHORT_RUN_ROWS

    def _step(self, sequences: list[Sequence]) -> Step | None:
        ready = {each: self._policy.ready_block(each, self.admission.prefills_for_others(each)) for each in sequences}
        turn = self._turn(ready)
        block = self._choose({sequence: ready[sequence] for sequence in turn})
        here = [sequence for sequence in turn if ready[sequence] == block]
        is_lone = len(self._running) == 1 and not self.admission.may_admit
        rows = here[0].pending_rows(block)
        goes_on = is_lone and rows.stop == here[0].num_tokens and len(rows) <= self._budget
        blocks = range(block, self.num_blocks) if goes_on else self._passes[block]
        granted = self._grant(block, here)
        if not granted:
            return None
        limit = self._multi_steps(granted) if len(blocks) > 1 or self.num_blocks == 1 else 1
        return Step(blocks, [Run(*each) for each in granted.items()], self._policy, limit, MULTI_STEP_SECONDS)

    def _choose(self, ready: dict[Sequence, int]) -> int:
        """Return the deepest block for which enough sequences wait. If a sequence is overdue, return its block."""
        waiting, least = Counter(ready.values()), 1 + len(self._running) // 4
        longest_waiting = min(ready, key=attrgetter("last_step"))
        if self._is_overdue(longest_waiting):
            return ready[longest_waiting]
        enough = [block for block, count in waiting.items() if block and count >= least]
        return max(enough, default=min(waiting))

    def _is_overdue(self, sequence: Sequence) -> bool:
        return self._num_steps - sequence.last_step >= self.config.max_wait_steps

    def _grant(self, first: int, sequences: list[Sequence], *, preempts: bool = True) -> dict[Sequence, int]:
        """Return up to which row each sequence may run in a Step, within the row budget and the available pages.

        If pages run out, preempt sequences, or return {} if not `preempts`.
        """
        last, rows_left, granted = self._passes[first][-1], self._budget, dict[Sequence, int]()
        for sequence in sequences:
            start = sequence.filled[last]
            stop = min(sequence.pending_rows(first).stop, start + rows_left)
            if sequence.seat is None or stop <= start:
                continue
            if preempts:
                if not self.admission.make_room(sequence, stop, granted):
                    continue
            elif not self._pool.grow(sequence, stop):
                return {}
            rows_left -= stop - start
            granted[sequence] = stop
        return granted

    def _rows_after(self, step: Step) -> list[Rows]:
        """Schedule the Step after this one, if no outcome but an end can change it. Return its rows."""
        if not (self.async_scheduling and self._policy.allows_async):
            return []
        if not self.drafts.is_off and any(sequence.is_original for sequence in self._running):
            return []
        emitting = [run.sequence for run in step.runs if run.reaches_front]
        if not all(sequence.allows_async and sequence.changes is None for sequence in emitting):
            return []
        long_ran = self._long_ran
        with assume_passed(step.runs, emitting):
            ready = [s for s in self._running if s.filled[-1] < s.num_rows and not s.awaits_constraint]
            granted = self._grant(0, self._turn(dict.fromkeys(ready, 0)), preempts=False) if ready else {}
            rows = [Rows(sequence, range(sequence.filled[-1], stop)) for sequence, stop in granted.items()]
        self._long_ran = long_ran
        return rows

    def _step_of_rows(self, scheduled: list[Rows]) -> Step | None:
        """Return the Step of `Step.async_rows`, without the sequences that have ended or lost their pages."""
        runs = [Run(sequence, rows.stop) for sequence, rows in scheduled if self._is_pending(sequence, rows)]
        if not (runs and self._policy.allows_async):
            return None
        self._long_ran = self._is_long(runs[0].sequence, 0)
        return Step(range(self.num_blocks), runs, self._policy)

    def _is_pending(self, sequence: Sequence, rows: range) -> bool:
        is_next = sequence.filled[-1] == rows.start and rows.stop <= sequence.num_rows
        has_pages = sequence.seat is not None and len(sequence.pages) * self._pool.page_size >= rows.stop
        return is_next and has_pages and not sequence.awaits_constraint

    def _multi_steps(self, granted: dict[Sequence, int]) -> int:
        """Return how many tokens each of these sequences may emit in one call."""
        if len(granted) < len(self._running) or not self.num_multi_steps:
            return 1
        if not all(s.allows_async and stop == s.num_tokens for s, stop in granted.items()):
            return 1
        if any(sequence.is_original and not self.drafts.is_off for sequence in granted):
            return 1
        spare = self._pool.num_free - self.admission.num_promised_pages()
        for sequence in granted:
            num_rows = min(sequence.num_tokens + self.num_multi_steps, sequence.max_length) - 1
            missing = self._pool.num_pages_for(num_rows) - len(sequence.pages)
            if 0 < missing <= spare and self._pool.grow(sequence, num_rows):
                spare -= missing
        room = min(len(s.pages) * self._pool.page_size + 1 - s.num_tokens for s in granted)
        return max(1, min(self.num_multi_steps, room, *(s.max_length - s.num_tokens for s in granted)))


@contextmanager
def assume_passed(runs: Items[Run], emitting: Items[Sequence]) -> Iterator[None]:
    """Inside the context, these runs have passed all blocks, and the `emitting` ones have emitted unknown tokens."""
    before = [(run.sequence, run.sequence.filled) for run in runs]
    for sequence, stop in runs:
        sequence.filled = [stop] * len(sequence.filled)
    for sequence in emitting:
        sequence.token_ids.append(NO_TOKEN)
        sequence.finish_reason = "length" if sequence.num_tokens == sequence.max_length else None
    try:
        yield
    finally:
        for sequence in emitting:
            sequence.token_ids.pop()
            sequence.finish_reason = None
        for sequence, filled in before:
            sequence.filled = filled
