"""Admission, seats, preemption and the waiting queue, without a model."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvium_core import SamplingParams
from nvium_core.engine.schedule.admission import WaitingQueue
from nvium_core.engine.schedule.sequence import Sequence
from tests.engine.schedule.test_scheduler import carry_out, newcomer, next_step, num_rows, scheduler_with


def test_the_youngest_is_preempted_when_pages_run_out_and_keeps_its_tokens():
    scheduler = scheduler_with(num_pages=4)
    old, young = newcomer(scheduler, 0, 4), newcomer(scheduler, 1, 2)
    carry_out(next_step(scheduler), exiting={"0", "1"})
    assert [run.sequence for run in next_step(scheduler).runs] == [old]
    assert scheduler.admission.num_preemptions == 1
    assert young.filled == [0, 0, 0]
    assert young.num_tokens == 3
    assert list(scheduler.admission.waiting) == [young]
    scheduler.admission.check_integrity()


def test_sequences_beyond_the_limit_wait_their_turn_and_a_seat_has_one_owner():
    scheduler = scheduler_with(max_sequences=2)
    first, second, _ = (newcomer(scheduler, arrival, 1) for arrival in range(3))
    assert len(next_step(scheduler).runs) == 2
    scheduler.admission.remove(first)
    next_step(scheduler)
    assert [s.request_id for s in scheduler.admission.running] == ["1", "2"]
    scheduler.admission.check_integrity()
    second.seat = scheduler.admission.running[1].seat
    with pytest.raises(AssertionError, match="seat"):
        scheduler.admission.check_integrity()


@pytest.mark.parametrize("num_steps_between", [0, 1])
@pytest.mark.parametrize(("num_pages", "num_admitted"), [(4, 1), (5, 2)])
def test_admission_leaves_every_running_sequence_a_free_page(num_steps_between, num_pages, num_admitted):
    scheduler = scheduler_with(num_pages=num_pages)
    newcomer(scheduler, 0, 4)
    for _ in range(num_steps_between):
        next_step(scheduler)
    newcomer(scheduler, 1, 4)
    next_step(scheduler)
    assert len(scheduler.admission.running) == num_admitted


def test_a_lone_sequence_may_take_every_page_and_none_overtakes_one_that_waits_for_pages():
    scheduler = scheduler_with(num_pages=4)
    newcomer(scheduler, 0, 8)
    assert num_rows(next_step(scheduler)) == 8
    scheduler = scheduler_with(num_pages=6)
    newcomer(scheduler, 0, 4)
    newcomer(scheduler, 1, 10)
    newcomer(scheduler, 2, 1)
    next_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.admission.running] == ["0"]


def test_choices_that_wait_for_their_leader_delay_no_other_request():
    scheduler = scheduler_with()
    choices = [newcomer(scheduler, arrival, 9) for arrival in range(3)]
    for sequence in choices:
        sequence.siblings = choices
    newcomer(scheduler, 3, 2)
    carry_out(next_step(scheduler))
    assert [sequence.request_id for sequence in scheduler.admission.running] == ["0", "3"]
    scheduler.admission.remove(choices[0])
    next_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.admission.running] == ["1", "3"]


def test_admitted_sequences_and_their_cached_prompt_tokens_are_reported():
    scheduler = scheduler_with("sweep", num_blocks=1)
    first = newcomer(scheduler, 0, 7)
    assert first.num_cached_prompt_tokens is None
    step = next_step(scheduler)
    assert (scheduler.admission.admitted, first.num_cached_prompt_tokens) == ([first], 0)
    carry_out(step, exiting={"0"})
    scheduler.admission.pool.register(first, since=0)
    second = newcomer(scheduler, 1, 7)
    step = next_step(scheduler)
    assert (scheduler.admission.admitted, second.num_cached_prompt_tokens) == ([second], 6)
    carry_out(step, exiting={"0", "1"})
    assert next_step(scheduler) and scheduler.admission.admitted == []


def test_rows_found_after_a_preemption_do_not_count_as_cached_prompt_tokens():
    scheduler = scheduler_with("sweep", num_blocks=1)
    sequence = newcomer(scheduler, 0, 3)
    for _ in range(3):
        carry_out(next_step(scheduler), exiting={"0"})
    scheduler.admission.pool.register(sequence, since=0)
    scheduler.admission.preempt(sequence)
    next_step(scheduler)
    assert scheduler.admission.admitted == [sequence]
    assert (sequence.filled, sequence.num_cached_prompt_tokens) == ([4], 0)


TENANTS = ["", "a", "b", "c"]


def queued(tenant: str, number: int, choice: int = 0) -> Sequence:
    placed = {"choice": choice, "tenant": tenant}
    return Sequence(f"request-{number}", [0], SamplingParams(), seed=0, num_blocks=1, arrival=number, **placed)


class SlowLine:
    """A slow waiting queue: plain lists of new sequences, preempted sequences, and tenants in the order of turns."""

    def __init__(self) -> None:
        self.newcomers: list[Sequence] = []
        self.returned: list[Sequence] = []
        self.turns: list[str] = []

    @property
    def waiting(self) -> list[Sequence]:
        return self.returned + self.newcomers

    def add(self, sequence: Sequence) -> None:
        self.newcomers.append(sequence)
        if sequence.tenant not in self.turns:
            self.turns.append(sequence.tenant)

    def in_order(self) -> list[Sequence]:
        """Return all waiting sequences in the order of the line."""
        by_turn = [[s for s in self.newcomers if s.tenant == tenant] for tenant in self.turns]
        return self.returned + [s for own in by_turn for s in own]

    def admit(self, sequence: Sequence) -> None:
        is_turn = sequence in self.newcomers
        self.remove(sequence)
        if is_turn and sequence.tenant in self.turns:
            self.turns.remove(sequence.tenant)
            self.turns.append(sequence.tenant)

    def remove(self, sequence: Sequence) -> None:
        (self.newcomers if sequence in self.newcomers else self.returned).remove(sequence)
        self.turns = [tenant for tenant in self.turns if any(s.tenant == tenant for s in self.newcomers)]


class Waiting(RuleBasedStateMachine):
    """Compares both lines."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.slow = WaitingQueue(), SlowLine()
        self.number = 0
        self.inside: list[Sequence] = []
        self.held: set[str] = set()

    def is_held(self, sequence: Sequence) -> bool:
        return sequence.request_id in self.held

    @rule(tenant=st.sampled_from(TENANTS), num_choices=st.sampled_from([1, 1, 2, 3]))
    def add(self, tenant: str, num_choices: int) -> None:
        for choice in range(num_choices):
            sequence = queued(tenant, self.number, choice)
            self.line.add(sequence)
            self.slow.add(sequence)
        self.number += 1

    @rule(number=st.integers(1, 4))
    def let_in(self, number: int) -> None:
        for _ in range(number):
            sequence = self.line.first(self.is_held)
            assert sequence is next((s for s in self.slow.in_order() if not self.is_held(s)), None)
            if sequence is not None:
                self.line.admit(sequence)
                self.slow.admit(sequence)
                self.inside.append(sequence)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        sequence = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.line.put_back(sequence)
        self.slow.returned.insert(0, sequence)

    @precondition(lambda self: self.slow.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.slow.waiting))
        self.line.remove(sequence)
        self.slow.remove(sequence)

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def hold_or_let_go(self, data: st.DataObject) -> None:
        self.held ^= {f"request-{data.draw(st.integers(0, self.number - 1))}"}

    @invariant()
    def both_lines_are_equal(self) -> None:
        assert list(self.line) == self.slow.in_order()
        assert len(self.line) == len(self.slow.waiting)
        assert bool(self.line) == bool(self.slow.waiting)


TestWaiting = Waiting.TestCase


class CountedSequence(Sequence):
    """Counts hashes and comparisons of sequences."""

    num_touches = 0

    def __hash__(self) -> int:
        CountedSequence.num_touches += 1
        return id(self) // 16

    def __eq__(self, other: object) -> bool:
        CountedSequence.num_touches += 1
        return self is other


@pytest.mark.parametrize("num_tenants", [1, 300])
def test_the_work_per_sequence_does_not_grow_with_the_line(num_tenants):
    line, crowd = WaitingQueue(), [queued(str(number % num_tenants), number) for number in range(3_000)]
    CountedSequence.num_touches = 0
    for sequence in crowd:
        sequence.__class__ = CountedSequence
        line.add(sequence)
    for sequence in crowd[500:2_500]:
        line.remove(sequence)

    def is_held(sequence: Sequence) -> bool:
        CountedSequence.num_touches += 1
        return sequence.arrival in (0, 1)

    for _ in range(998):
        line.admit(line.first(is_held))
    assert [sequence.arrival for sequence in line] == [0, 1]
    assert CountedSequence.num_touches < 20 * len(crowd)
