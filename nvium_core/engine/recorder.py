"""Records the outcomes of Steps: advances staircases and creates events. Torch-free.

A token that needs a score is held back until its score is known. If a sequence's constraint is slow, the outcome of
its Step becomes events only when the constraint has decided whether the output is complete.
"""

import math
import time
from collections import deque
from collections.abc import Sequence as Items

from nvium_core.choices import FinishReason
from nvium_core.engine.constraint import MAX_PATIENCE_SECONDS
from nvium_core.engine.errors import EngineError, NoTokenAllowed
from nvium_core.engine.events import Event, FailureEvent, PromptEvent, Score, TokenEvent
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import NO_TOKEN, Emission, Outcome, Step

IDLE_SECONDS = 0.01
"""Maximum time that an engine with nothing to run waits for constraints. Then the worker reads new requests."""


class Recorder:
    def __init__(self, scheduler: Scheduler, *, vocab_size: int) -> None:
        self.requests: dict[str, list[Sequence]] = {}
        """Unfinished choices of each request."""
        self._scheduler, self._admission = scheduler, scheduler.admission
        self._pool = self._admission.pool
        self._vocab_size = vocab_size
        self._held_back: dict[Sequence, deque[TokenEvent]] = {}
        self._unsettled: dict[Sequence, Outcome | None] = {}
        """Sequences that wait for their constraints, with the outcomes of their last Steps."""

    @property
    def holds_back(self) -> bool:
        return bool(self._held_back or self._unsettled)

    def add(self, sequences: list[Sequence]) -> None:
        self.requests[sequences[0].request_id] = sequences
        for sequence in sequences:
            sequence.siblings = sequences
            self._admission.waiting.add(sequence)
            if sequence.awaits_constraint:
                self._unsettled[sequence] = None

    def end(self, sequence: Sequence) -> None:
        if sequence.seat is not None:
            sequence.drop_drafts()
        self._admission.remove(sequence)
        self._scheduler.drafts.forget(sequence)
        self._held_back.pop(sequence, None)
        self._unsettled.pop(sequence, None)
        if not self.requests[sequence.request_id]:
            del self.requests[sequence.request_id]

    def record(self, step: Step, outcomes: Items[Outcome]) -> list[Event]:
        events: list[Event] = []
        for (sequence, _), outcome in zip(step.runs, outcomes, strict=True):
            if outcome.error is not None:
                events.append(self._fail(sequence, "the model's forward pass failed"))
                continue
            since = sequence.filled[-1]
            sequence.filled = outcome.filled
            if outcome.emissions and not self._emit_all(sequence, outcome.emissions, events):
                continue
            sequence.log_reached = outcome.log_reached
            if outcome.filled[-1] // self._pool.page_size > since // self._pool.page_size:
                self._pool.register(sequence, since)
            if sequence.awaits_constraint:
                self._unsettled[sequence] = outcome
            else:
                self._conclude(sequence, outcome, events)
        return events

    def settle(self, *, is_idle: bool) -> list[Event]:
        """Wait briefly for slow constraints. Return the events of sequences whose constraints are ready."""
        events: list[Event] = []
        now = time.monotonic()
        until = now + (IDLE_SECONDS if is_idle else MAX_PATIENCE_SECONDS)
        for sequence, outcome in list(self._unsettled.items()):
            if sequence.seat is None and outcome is None:  # a constraint starts its work at the first question
                continue
            constraint, started = sequence.constraint, now
            assert constraint is not None
            left = max(0.0, until - started)
            is_ready = constraint.is_ready(left if is_idle else min(left, constraint.patience))
            now = time.monotonic()
            constraint.patience = max(0.0, constraint.patience - (now - started))
            if is_ready:
                del self._unsettled[sequence]
                sequence.awaits_constraint = False
                if outcome is not None:
                    self._conclude(sequence, outcome, events)
        return events

    def check_integrity(self) -> None:
        held = {*self._admission.waiting, *self._admission.running}
        assert held == {sequence for choices in self.requests.values() for sequence in choices}
        assert self._held_back.keys() | self._unsettled.keys() <= held
        assert all(self.requests.values())

    def _conclude(self, sequence: Sequence, outcome: Outcome, events: list[Event]) -> None:
        """Append the outcome's events, and end the sequence if it has finished."""
        for token_id, block, log_p in outcome.emissions if sequence.constraint is not None else ():
            self._emit(sequence, token_id, block, math.exp(log_p), events)
        if outcome.scores:
            events += self._attach_scores(sequence, outcome.scores)
        if sequence.finish_reason is None:
            sequence.append_drafts(self._scheduler.drafts.drafts_for(sequence, len(self._admission.running)))
        elif not sequence.owes_scores and not self._admission.prefills_for_others(sequence):
            self.end(sequence)

    def _emit_all(self, sequence: Sequence, emissions: Items[Emission], events: list[Event]) -> bool:
        """Append emitted tokens. Return False if the sequence failed and was ended."""
        num_drafts, num_accepted = sequence.num_drafts, 0
        for token_id, block, log_p in emissions:
            if token_id == NO_TOKEN:
                events.append(self._fail_to_emit(sequence))
                return False
            if sequence.is_original:
                num_accepted += sequence.verify(token_id)
            else:
                sequence.append(token_id)
            if sequence.awaits_constraint:
                break
            self._emit(sequence, token_id, block, math.exp(log_p), events)
            if sequence.finish_reason is not None:
                break
        if sequence.is_original:
            sequence.drop_drafts()
            self._scheduler.drafts.record(num_drafts, num_accepted)
        return True

    def _emit(self, sequence: Sequence, token_id: int, block: int, probability: float, events: list[Event]) -> None:
        is_stop, constraint = token_id in sequence.stop_token_ids, sequence.constraint
        reason: FinishReason | None = "length" if sequence.num_verified == sequence.max_length else None
        if is_stop or (constraint is not None and constraint.is_over):
            reason = "stop"
        sequence.finish_reason = reason
        event = TokenEvent(
            sequence.request_id, token_id, block + 1, probability, reason, sequence.choice, None, is_stop
        )
        if sequence.needs_scores:
            self._held_back.setdefault(sequence, deque()).append(event)
        else:
            events.append(event)

    def _attach_scores(self, sequence: Sequence, scores: Items[Score]) -> list[Event]:
        """Add scores to held-back tokens and prompt tokens. Return their events.

        At a token's exit, the states after later blocks are unknown, and so are their p_k.
        """
        num_of_prompt = max(0, sequence.num_prompt_tokens - 1 - sequence.num_scored)
        of_prompt, of_tokens = scores[:num_of_prompt], scores[num_of_prompt:]
        if sequence.is_scored_at_exit:
            of_tokens = [score._replace(exit_probabilities=()) for score in of_tokens]
        sequence.num_scored += len(scores)
        events: list[Event] = []
        if of_prompt:
            reason = sequence.finish_reason if sequence.params.max_tokens == 0 and not sequence.owes_scores else None
            events.append(PromptEvent(sequence.request_id, tuple(of_prompt), reason, sequence.choice))
        events += [self._held_back[sequence].popleft()._replace(score=score) for score in of_tokens]
        return events

    def _fail(self, sequence: Sequence, message: str) -> FailureEvent:
        """End a sequence, and remove its possibly corrupt pages from the prefix cache."""
        self._pool.invalidate(sequence)
        self.end(sequence)
        return FailureEvent(sequence.request_id, EngineError(message), sequence.choice)

    def _fail_to_emit(self, sequence: Sequence) -> FailureEvent:
        """End a sequence that has no valid next token, because of its constraint or of NaN logits."""
        constraint = sequence.constraint
        if constraint is None or constraint.allows_any(self._vocab_size):
            return self._fail(sequence, "the model's output is not finite")
        self.end(sequence)
        error = constraint.error or NoTokenAllowed("the request's constraint allows no token of the vocabulary")
        return FailureEvent(sequence.request_id, error, sequence.choice)
