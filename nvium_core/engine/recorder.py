"""Records the results of Steps: advances staircases, turns tokens, scores and endings into events. Torch-free.

A token whose score was asked for is held back until its row has passed every block.
"""

import math
from collections import deque
from collections.abc import Sequence as Items

from nvium_core.engine.events import Event, FailureEvent, PromptEvent, Score, TokenEvent
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import FinishReason, Sequence
from nvium_core.engine.schedule.speedup import PiggybackSpeedup, is_dense
from nvium_core.engine.schedule.step import NO_TOKEN, FrontDecision, Run, Step, StepResult

NOTHING_ALLOWED = "the request's constraint allows no token of the model"
CONSTRAINT_LIMIT = "the request's constraint is too complex to be followed further"


class Recorder:
    def __init__(self, scheduler: Scheduler, speedup: PiggybackSpeedup, *, vocab_size: int) -> None:
        self.requests: dict[str, list[Sequence]] = {}
        """Each request's living choices."""
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._speedup = speedup
        self._vocab_size = vocab_size
        self._held_back: dict[Sequence, deque[TokenEvent]] = {}

    @property
    def holds_back(self) -> bool:
        return bool(self._held_back)

    def add(self, sequences: list[Sequence]) -> None:
        """The choices of a request."""
        self.requests[sequences[0].id] = sequences
        for sequence in sequences:
            sequence.siblings = sequences
            self._scheduler.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Free what it has."""
        if sequence.seat is not None:
            self._speedup.drop(sequence, self._scheduler.running)
        self._scheduler.remove(sequence)
        self._held_back.pop(sequence, None)
        if not self.requests[sequence.id]:
            del self.requests[sequence.id]

    def record(self, results: list[StepResult]) -> list[list[Event]]:
        """Events of each result."""
        runs = results[0].step.runs
        if len(results) == self._scheduler.num_blocks > 1 and False not in [is_quick(each, runs) for each in results]:
            return self._record_pass(results, runs)
        return [self._record(result) for result in results]

    def _record_pass(self, results: list[StepResult], runs: list[Run]) -> list[list[Event]]:
        """The same rows have passed every block, and nothing failed: each run is updated once."""
        running = self._scheduler.running
        if not is_dense(results[0].step, running):
            for result in results:
                self._speedup.begin(result.step, running)
        events: list[list[Event]] = []
        for block, result in enumerate(results):
            of_block: list[Event] = []
            events.append(of_block)
            for sequence, decision in result.decisions.items():
                self._decided(sequence, block, decision, of_block)
        scored = results[-1].scores
        for sequence, rows, _ in runs:
            assert sequence.filled[0] == rows.start and sequence.filled[-1] == rows.start
            sequence.filled = [rows.stop] * len(results)
            self._pool.publish(sequence, since=rows.start)
            if scored and sequence in scored:
                events[-1] += self._scored(sequence, scored[sequence])
            if sequence.finish_reason is not None and self._is_over(sequence):
                self.end(sequence)
        return events

    def _record(self, result: StepResult) -> list[Event]:
        step = result.step
        if None in [run.sequence.seat for run in step.runs]:  # they ended earlier in the same call
            step = Step(step.block, [run for run in step.runs if run.sequence.seat is not None])
        if not step.runs:
            return []
        self._speedup.begin(step, self._scheduler.running)
        events: list[Event] = []
        for run in step.runs:
            self._record_run(step.block, run, result, events)
        return events

    def check_integrity(self) -> None:
        held = {*self._scheduler.waiting, *self._scheduler.running}
        assert held == {sequence for choices in self.requests.values() for sequence in choices}
        assert self._held_back.keys() <= held
        assert all(self.requests.values())

    def _record_run(self, block: int, run: Run, result: StepResult, events: list[Event]) -> None:
        """Appends to the events."""
        sequence = run.sequence
        if sequence in result.errors:
            events.append(self._fail(sequence, "running the model failed"))
            return
        decision = result.decisions.get(sequence)
        sequence.advance(block, run.rows)
        if decision is not None and decision.token_id == NO_TOKEN:
            events.append(self._fail_to_emit(sequence))
            return
        if block == self._scheduler.num_blocks - 1:
            self._pool.publish(sequence, since=run.rows.start)
        if decision is not None:
            self._decided(sequence, block, decision, events)
        if result.scores and (scores := result.scores.get(sequence)):
            events += self._scored(sequence, scores)
        if sequence.finish_reason is not None and self._is_over(sequence):
            self.end(sequence)

    def _is_over(self, sequence: Sequence) -> bool:
        """Neither scores nor the prompt that others wait for are due."""
        return not sequence.owes_scores and not self._scheduler.prefills_for_others(sequence)

    def _decided(self, sequence: Sequence, block: int, decision: FrontDecision, events: list[Event]) -> None:
        token_id, log_exit, log_continue = decision
        if token_id is None:
            sequence.log_reached += log_continue
            return
        probability = math.exp(sequence.log_reached + log_exit)
        sequence.append(token_id)
        sequence.finish_reason = reason = finish_reason(sequence)
        is_stop = reason is not None and token_id in sequence.stop_token_ids
        event = TokenEvent(sequence.id, token_id, block + 1, probability, reason, sequence.choice, None, is_stop)
        if sequence.needs_scores:
            self._held_back.setdefault(sequence, deque()).append(event)
        else:
            events.append(event)

    def _scored(self, sequence: Sequence, scores: Items[Score]) -> list[Event]:
        """Events that waited for these scores."""
        num_of_prompt = max(0, sequence.num_prompt_tokens - 1 - sequence.num_scored)
        of_prompt, of_tokens = scores[:num_of_prompt], scores[num_of_prompt:]
        sequence.num_scored += len(scores)
        events: list[Event] = []
        if of_prompt:
            reason = sequence.finish_reason if sequence.params.max_tokens == 0 and not sequence.owes_scores else None
            events.append(PromptEvent(sequence.id, tuple(of_prompt), reason, sequence.choice))
        events += [self._held_back[sequence].popleft()._replace(score=score) for score in of_tokens]
        return events

    def _fail(self, sequence: Sequence, message: str) -> FailureEvent:
        """End it alone. Its pages may be corrupt, so they must not be found again."""
        self._pool.forget(sequence)
        self.end(sequence)
        return FailureEvent(sequence.id, message, sequence.choice)

    def _fail_to_emit(self, sequence: Sequence) -> FailureEvent:
        """End one without a possible token: its constraint allows none, or else the model is broken."""
        constraint = sequence.constraint
        if constraint is None or constraint.allows_any(self._vocab_size):
            return self._fail(sequence, "the model's output is not finite")
        self.end(sequence)
        if constraint.is_too_costly:
            return FailureEvent(sequence.id, CONSTRAINT_LIMIT, sequence.choice, "constraint_limit")
        if constraint.has_failed:
            return FailureEvent(sequence.id, "the request's constraint failed", sequence.choice)
        return FailureEvent(sequence.id, NOTHING_ALLOWED, sequence.choice, "no_token_allowed")


def is_quick(result: StepResult, runs: list[Run]) -> bool:
    """It is of these runs, and nothing failed."""
    if result.step.runs is not runs or result.errors or not result.is_complete:
        return False
    return NO_TOKEN not in [decision.token_id for decision in result.decisions.values()]


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Why the token just appended is the last one, if it is."""
    if sequence.constraint is not None and sequence.constraint.is_over:
        return "stop"
    token_ids = sequence.token_ids
    if token_ids[-1] in sequence.stop_token_ids:
        return "stop"
    return "length" if len(token_ids) - sequence.num_prompt_tokens == sequence.params.max_tokens else None
