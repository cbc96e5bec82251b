"""Admission: which sequences run, and on which seats and pages. Torch-free."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from itertools import chain
from operator import attrgetter

from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.sequence import Sequence


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
            self.waiting.admit(sequence)
            self.pool.acquire(sequence, found)
            if sequence.num_cached_prompt_tokens is None:
                sequence.num_cached_prompt_tokens = sequence.filled[0]
            sequence.seat = self._seats.pop()
            insort(self.running, sequence, key=attrgetter("arrival"))
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

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        self.running.remove(sequence)
        self.pool.release(sequence)
        self._seats.append(sequence.seat)
        sequence.seat = None


Requests = dict[str, dict[Sequence, None]]
"""The waiting choices of each request, by request id, in order of arrival."""


class WaitingQueue:
    """Waiting sequences, in which tenants take turns.

    Within a tenant the earliest request goes first. Preempted sequences go before all other sequences. `first` takes
    time in proportion to the held requests. All other operations take constant time.
    """

    def __init__(self) -> None:
        self._preempted: dict[Sequence, None] = {}
        """Preempted sequences, most recent last."""
        self._tenants: OrderedDict[str, Requests] = OrderedDict()
        """Queue of each tenant, in the order of their turns."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return chain(reversed(self._preempted), chain.from_iterable(self._new_requests()))

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence to its tenant's queue. A new tenant gets the last turn."""
        requests = self._tenants.setdefault(sequence.tenant, {})
        requests.setdefault(sequence.request_id, {})[sequence] = None
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        self._preempted[sequence] = None
        self._num_waiting += 1

    def first(self, is_held: Callable[[Sequence], bool]) -> Sequence | None:
        """Return the next sequence for which `is_held` is False. While all sequences of a tenant are held, the tenant
        keeps its turn. If a choice of a request is held, its later choices must be held too."""
        heads = (next(iter(choices)) for choices in self._new_requests())
        return next((sequence for sequence in chain(reversed(self._preempted), heads) if not is_held(sequence)), None)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence in order to run it. This uses up its tenant's turn, unless the sequence was preempted."""
        is_turn = sequence not in self._preempted
        self.remove(sequence)
        if is_turn and sequence.tenant in self._tenants:
            self._tenants.move_to_end(sequence.tenant)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence. Its tenant keeps its turn."""
        self._num_waiting -= 1
        if sequence in self._preempted:
            del self._preempted[sequence]
            return
        requests = self._tenants[sequence.tenant]
        choices = requests[sequence.request_id]
        del choices[sequence]
        if not choices:
            del requests[sequence.request_id]
        if not requests:
            del self._tenants[sequence.tenant]

    def _new_requests(self) -> Iterator[dict[Sequence, None]]:
        for requests in self._tenants.values():
            yield from requests.values()
