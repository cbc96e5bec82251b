"""Records the results of Steps: advances staircases, turns tokens, scores and endings into events. Torch-free.

A token whose score was asked for is held back until its row has passed every block.
"""

import math
from collections import deque
from collections.abc import Sequence as Items

from nvium_core.engine.events import Event, FailureEvent, PromptEvent, Score, TokenEvent
from nvium_core.engine.schedule.ngrams import continued
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import DRAFTER, LOOKUP, FinishReason, Sequence
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
            sequence.take_back()
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
        step, running = results[0].step, self._scheduler.running
        if not step.repeats and not is_dense(step, running):
            for result in results:
                self._speedup.begin(result.step, running)
        events: list[list[Event]] = [[] for _ in results]
        for block, result in enumerate(results):
            for sequence, decision in result.decisions.items():
                self._decided(sequence, block, decision, events[block])
        finished = self._advance(runs, len(results))
        for sequence, scores in results[-1].scores.items():
            events[-1] += self._scored(sequence, scores)
        for sequence in finished:
            if self._is_over(sequence):
                self.end(sequence)
        return events

    def _advance(self, runs: list[Run], num_blocks: int) -> list[Sequence]:
        """These rows have passed every block, but those of sequences that could not emit and have ended. Returns those
        that have emitted their last token."""
        page_size, finished = self._pool.page_size, list[Sequence]()
        for sequence, rows, _ in runs:
            if sequence.seat is not None:
                start, stop = rows.start, rows.stop
                assert sequence.filled[0] == start and sequence.filled[-1] == start
                sequence.filled = [stop] * num_blocks
                if stop // page_size > start // page_size:
                    self._pool.publish(sequence, since=start)
                if sequence.finish_reason is not None:
                    finished.append(sequence)
        return finished

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
        sequence.advance(block, run.rows)
        if tokens := result.verified.get(sequence):
            self._verify(sequence, tokens, events)
            self._draft_ahead(sequence, result.drafts.get(sequence, ()))
        elif (decision := result.decisions.get(sequence)) is not None:
            self._decided(sequence, block, decision, events)
        if sequence.seat is None:  # it could not emit
            return
        if block == self._scheduler.num_blocks - 1:
            self._pool.publish(sequence, since=run.rows.start)
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
        elif token_id == NO_TOKEN:
            events.append(self._fail_to_emit(sequence))
        elif sequence.is_original:
            sequence.append_draft(token_id, block)
        else:
            probability = math.exp(sequence.log_reached + log_exit)
            sequence.append(token_id)
            self._emit(sequence, token_id, block, probability, events)

    def _verify(self, sequence: Sequence, tokens: Items[int], events: list[Event]) -> None:
        """The last exit's tokens behind the rows that it has just seen, up to the first that was drafted wrong."""
        last_block, filled = self._scheduler.num_blocks - 1, list(sequence.filled)
        drafted_at, num_right = list(sequence.drafted_at), 0
        for token_id in tokens[: sequence.num_right(tokens) + 1]:
            if token_id == NO_TOKEN:
                events.append(self._fail_to_emit(sequence))
                return
            block = sequence.verify(token_id, last_block)
            num_right += block != last_block
            self._emit(sequence, token_id, last_block if block < 0 else block, 1.0, events)
            if sequence.finish_reason is not None:
                break
        if sequence.finish_reason is not None:
            sequence.take_back()
        num_drafted = len(drafted_at) - len(sequence.drafted_at)
        self._scheduler.drafting.observe(drafted_at[0] if drafted_at else 0, num_drafted, num_right)
        if sequence.filled != filled:
            self._speedup.take_back(sequence, filled, self._scheduler.running)

    def _draft_ahead(self, sequence: Sequence, by_drafter: Items[int]) -> None:
        """What followed the last tokens before, where that pays; else what the drafter has drafted, if anything."""
        drafting = self._scheduler.drafting
        if drafting.is_off or not sequence.may_draft or sequence.drafted_at:
            return
        find = sequence.look_up(drafting.copies_right[sequence.params.temperature == 0])
        if find and (number := drafting.num_copied(find.share, len(self._scheduler.running))):
            copied = continued(sequence.token_ids, find.end, sequence.num_tokens, number)
            sequence.append_drafts(copied, LOOKUP)
        else:
            sequence.append_drafts(by_drafter, DRAFTER)

    def _emit(self, sequence: Sequence, token_id: int, block: int, probability: float, events: list[Event]) -> None:
        """The last verified token, which came from behind this block."""
        sequence.finish_reason = reason = finish_reason(sequence, token_id)
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
        if sequence.seat is None:  # it could not emit
            return []
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
    return result.step.runs is runs and result.is_complete and not (result.errors or result.verified)


def finish_reason(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Why the token just emitted is the last one, if it is."""
    if token_id in sequence.stop_token_ids or (sequence.constraint is not None and sequence.constraint.is_over):
        return "stop"
    is_longest = len(sequence.token_ids) - len(sequence.drafted_at) == sequence.max_length
    return "length" if is_longest else None
