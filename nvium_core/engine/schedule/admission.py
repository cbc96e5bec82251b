"""Admission: which sequences run, and on which seats and pages. Torch-free."""

from bisect import insort
from collections.abc import Container
from operator import attrgetter

from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.waiting_queue import WaitingQueue


class Admission:
    """Admits waiting sequences while seats and pages are free. If pages run out, it preempts the youngest sequence."""

    def __init__(self, pool: PagePool, num_seats: int) -> None:
        self.pool = pool
        self.num_seats = num_seats
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In order of arrival."""
        self.admitted: list[Sequence] = []
        """Sequences that the last call of `admit` admitted."""
        self.num_preemptions = 0
        self._seats = list(reversed(range(num_seats)))

    @property
    def may_admit(self) -> bool:
        """Whether a sequence waits and a seat is free."""
        return bool(self.waiting and self._seats)

    def admit(self) -> list[Sequence]:
        """Admit sequences while each gets a seat, pages for its tokens and a spare page. Return them."""
        self.admitted, promised = [], self.num_promised_pages() if self.may_admit else 0
        while self.may_admit and (sequence := self.waiting.first(self._is_held)):
            found = self.pool.match(sequence)
            missing = self.pool.num_pages_for(sequence.num_tokens) - len(found)
            if promised + missing > self.pool.num_free_without(found):
                break
            promised += 1 + missing
            self._seat(sequence, found)
            self.admitted.append(sequence)
        return self.admitted

    def remove(self, sequence: Sequence) -> None:
        sequence.siblings.remove(sequence)
        if sequence.seat is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free a sequence's seat and pages, and put it at the front of the waiting queue."""
        self._vacate(sequence)
        sequence.reset()
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def make_room(self, sequence: Sequence, num_positions: int, granted: Container[Sequence]) -> bool:
        """Allocate pages. If needed, preempt the youngest sequences that are not in `granted`.

        Return False if that includes `sequence`.
        """
        while not self.pool.grow(sequence, num_positions):
            victim = next((s for s in reversed(self.running) if s not in granted), sequence)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def num_promised_pages(self) -> int:
        """Return how many pages the running sequences still need: for their tokens, and a spare one each."""
        return sum(max(0, 1 + self.pool.num_pages_for(s.num_tokens) - len(s.pages)) for s in self.running)

    def prefills_for_others(self, sequence: Sequence) -> bool:
        """Whether other choices of the request wait for prompt pages that this sequence computes."""
        if len(sequence.siblings) == 1 or sequence.siblings[0] is not sequence or not self.pool.keeps_pages:
            return False
        return sequence.filled[-1] // self.pool.page_size < (sequence.num_prompt_tokens - 1) // self.pool.page_size

    def check_integrity(self) -> None:
        """Assert that every page and seat has exactly its owners, and that every staircase is monotone."""
        self.pool.check_integrity(self.running)
        seats = [*self._seats, *(sequence.seat for sequence in self.running)]
        assert len(seats) == self.num_seats == len({*seats}), "a seat is leaked or has two owners"
        assert not any(sequence.pages or sequence.seat is not None for sequence in self.waiting)
        assert len({*self.waiting}) == len(self.waiting) == len(list(self.waiting)), "a sequence is queued twice"
        for sequence in self.running:
            stairs = [sequence.num_rows, *sequence.filled]
            assert stairs == sorted(stairs, reverse=True), "the staircase is not monotone"
            assert len(sequence.pages) >= self.pool.num_pages_for(sequence.filled[0])

    def _is_held(self, sequence: Sequence) -> bool:
        leader = sequence.siblings[0]
        return leader is not sequence and self.prefills_for_others(leader)

    def _seat(self, sequence: Sequence, found: list[int]) -> None:
        self.waiting.admit(sequence)
        self.pool.acquire(sequence, found)
        if sequence.num_cached_prompt_tokens is None:
            sequence.num_cached_prompt_tokens = sequence.filled[0]
        sequence.seat = self._seats.pop()
        insort(self.running, sequence, key=attrgetter("arrival"))

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        self.running.remove(sequence)
        self.pool.release(sequence)
        self._seats.append(sequence.seat)
        sequence.seat = None
