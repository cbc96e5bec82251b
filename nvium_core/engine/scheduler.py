"""Who runs next: admission, the choice of a Step, and preemption when pages run out. Torch-free."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from nvium_core.engine.kv_cache import PagePool
from nvium_core.engine.policies import Policy
from nvium_core.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence's part of a Step: a prefix of its pending rows, and whether the front row is among them.

    Only then is the junction asked afterwards.
    """

    sequence: Sequence
    rows: range
    reaches_front: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One block, run for some sequences."""

    block: int
    runs: list[Run]

    @property
    def num_rows(self) -> int:
        return sum(len(run.rows) for run in self.runs)


class Scheduler:
    """Sequences wait, run, and leave; the older go first. Preempted ones wait again and lose nothing but time."""

    def __init__(self, policy: Policy, pool: PagePool, *, num_blocks: int, max_sequences: int, max_rows: int) -> None:
        self.policy = policy
        self.pool = pool
        self.num_blocks = num_blocks
        self.max_rows = max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.max_sequences = max_sequences
        self._seats = list(range(max_sequences - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Step | None:
        """The next Step, or None when there is nothing to do."""
        self._admit()
        while self.running:
            ready = [self.policy.ready_block(sequence) for sequence in self.running]
            block = self.policy.choose([ready.count(k) for k in range(self.num_blocks)])
            candidates = [s for s, ready_block in zip(self.running, ready, strict=True) if ready_block == block]
            if runs := list(self._runs(block, candidates)):
                return Step(block, runs)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Let a finished, cancelled or failed sequence go."""
        if sequence.seat is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def check_integrity(self) -> None:
        """Assert that pages and seats are each owned once, and that every staircase is one."""
        self.pool.check_integrity(self.running)
        seats = [*self._seats, *(sequence.seat for sequence in self.running)]
        assert len(seats) == self.max_sequences == len({*seats}), "a seat is leaked or taken twice"
        assert not any(sequence.pages or sequence.seat is not None for sequence in self.waiting)
        for sequence in self.running:
            stairs = [sequence.num_tokens, *sequence.filled]
            assert stairs == sorted(stairs, reverse=True), "the staircase is not monotone"
            assert len(sequence.pages) >= self.pool.num_pages_for(sequence.filled[0])

    def _admit(self) -> None:
        """Let waiting sequences in while there are seats, and pages for all the tokens of everyone inside."""
        while self.waiting and self._seats:
            promised = sum(self._missing_pages(sequence) for sequence in (*self.running, self.waiting[0]))
            if promised > self.pool.num_free:
                return
            sequence = self.waiting.popleft()
            sequence.seat = self._seats.pop()
            insort(self.running, sequence, key=attrgetter("arrival"))

    def _missing_pages(self, sequence: Sequence) -> int:
        return self.pool.num_pages_for(sequence.num_tokens) - len(sequence.pages)

    def _runs(self, block: int, candidates: list[Sequence]) -> Iterator[Run]:
        """Pending rows of the candidates, oldest first, within the row budget and the pages to be had."""
        budget = self.max_rows
        granted: set[str] = set()
        for sequence in candidates:
            rows = sequence.pending_rows(block)[:budget]
            if not rows or sequence.seat is None or not self._make_room(sequence, rows.stop, granted):
                continue
            budget -= len(rows)
            granted.add(sequence.id)
            yield Run(sequence, rows, reaches_front=rows.stop == sequence.num_tokens)

    def _make_room(self, sequence: Sequence, num_positions: int, granted: set[str]) -> bool:
        """Pages for the first `num_positions`, preempting the youngest if need be; False if it must wait itself."""
        while not self.pool.grow(sequence, num_positions):
            victim = next((s for s in reversed(self.running) if s.id not in granted), sequence)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages and put it back at the head of the queue."""
        self._vacate(sequence)
        sequence.reset()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        self.running.remove(sequence)
        self.pool.release(sequence)
        self._seats.append(sequence.seat)
        sequence.seat = None
