import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nvium_core import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.waiting_queue import WaitingQueue

TENANTS = ["", "a", "b", "c"]


def newcomer(tenant: str, number: int, choice: int = 0) -> Sequence:
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
            sequence = newcomer(tenant, self.number, choice)
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
    line, crowd = WaitingQueue(), [newcomer(str(number % num_tenants), number) for number in range(3_000)]
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
