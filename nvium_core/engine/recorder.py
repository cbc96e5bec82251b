"""What became of Steps: staircases move on, tokens, scores and endings become events. Torch-free.

A token whose score was asked for is held back until its row has passed every block.
"""

import math
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import replace

from nvium_core.engine.events import Event, FailureEvent, PromptEvent, Score, TokenEvent
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import FinishReason, Sequence
from nvium_core.engine.schedule.speedup import PiggybackSpeedup
from nvium_core.engine.schedule.step import NO_TOKEN, FrontDecision, Run, Step, StepResult

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

    def record(self, result: StepResult) -> list[Event]:
        step = result.step
        runs = [run for run in step.runs if run.sequence.seat is not None]  # others ended earlier in the same call
        if not runs:
            return []
        self._speedup.begin(Step(step.block, runs), self._scheduler.running)
        return [event for run in runs for event in self._record_run(step.block, run, result)]

    def check_integrity(self) -> None:
        held = {*self._scheduler.waiting, *self._scheduler.running}
        assert held == {sequence for choices in self.requests.values() for sequence in choices}
        assert self._held_back.keys() <= held
        assert all(self.requests.values())

    def _record_run(self, block: int, run: Run, result: StepResult) -> list[Event]:
        sequence = run.sequence
        if sequence in result.errors:
            return [self._fail(sequence, "running the model failed")]
        decision = result.decisions.get(sequence)
        sequence.advance(block, run.rows)
        if decision is not None and decision.token_id == NO_TOKEN:
            return [self._fail_to_emit(sequence)]
        if block == self._scheduler.num_blocks - 1:
            self._pool.publish(sequence, since=run.rows.start)
        events = [] if decision is None else self._decided(sequence, block, decision)
        if scores := result.scores.get(sequence):
            events += self._scored(sequence, scores)
        if sequence.finish_reason is not None and self._is_over(sequence):
            self.end(sequence)
        return events

    def _is_over(self, sequence: Sequence) -> bool:
        """Neither scores nor the prompt that others wait for are due."""
        return not sequence.owes_scores and not self._scheduler.prefills_for_others(sequence)

    def _decided(self, sequence: Sequence, block: int, decision: FrontDecision) -> list[Event]:
        if decision.token_id is None:
            sequence.log_reached += decision.log_continue
            return []
        probability = math.exp(sequence.log_reached + decision.log_exit)
        sequence.append(decision.token_id)
        sequence.finish_reason = finish_reason(sequence)
        event = TokenEvent(
            sequence.id,
            decision.token_id,
            block + 1,
            probability,
            sequence.finish_reason,
            sequence.choice,
            is_stop=decision.token_id in sequence.stop_token_ids,
        )
        if sequence.needs_logprobs:
            self._held_back.setdefault(sequence, deque()).append(event)
            return []
        return [event]

    def _scored(self, sequence: Sequence, scores: Items[Score]) -> list[Event]:
        """Events that waited for these scores."""
        num_of_prompt = max(0, sequence.num_prompt_tokens - 1 - sequence.num_scored)
        of_prompt, of_tokens = scores[:num_of_prompt], scores[num_of_prompt:]
        sequence.num_scored += len(scores)
        events: list[Event] = []
        if of_prompt:
            reason = sequence.finish_reason if sequence.params.max_tokens == 0 and not sequence.owes_scores else None
            events.append(PromptEvent(sequence.id, tuple(of_prompt), reason, sequence.choice))
        events += [replace(self._held_back[sequence].popleft(), score=score) for score in of_tokens]
        return events

    def _fail(self, sequence: Sequence, message: str) -> FailureEvent:
        """End it alone. Its pages may be what is wrong, so nobody may find them."""
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
        reason = "failed" if constraint.has_failed else "allows no token of the model"
        return FailureEvent(sequence.id, f"the request's constraint {reason}", sequence.choice)


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Why the token just appended is the last one, if it is."""
    is_satisfied = sequence.constraint is not None and sequence.constraint.is_over
    if is_satisfied or sequence.token_ids[-1] in sequence.stop_token_ids:
        return "stop"
    return "length" if sequence.num_generated == sequence.params.max_tokens else None
