"""The queue of waiting sequences: tenants take turns. Knows nothing of seats, pages or why a sequence is held back.

Within a tenant the lowest priority number goes first, and first come, first served among equals; preempted sequences
go before all. Nothing here takes longer when more wait, except finding the next one, which looks at every request that
is held back and at the priorities that a tenant has given.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from nvium_core.engine.schedule.sequence import Sequence

Requests = OrderedDict[str, dict[Sequence, None]]
"""By id, first come first: the choices of each that wait, in order."""

Queue = dict[int, Requests]
"""By priority."""


class WaitingLine:
    """Sequences that wait, each once."""

    def __init__(self) -> None:
        self._returned: OrderedDict[Sequence, None] = OrderedDict()
        """Preempted sequences, the most recent first."""
        self._tenants: OrderedDict[str, Queue] = OrderedDict()
        """Each tenant's queue; the tenant whose turn it is comes first."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Preempted ones, then tenant by tenant."""
        return chain(self._returned, chain.from_iterable(self._newcomers()))

    def add(self, sequence: Sequence) -> None:
        """Put a newcomer behind its tenant's others of its priority; a tenant without others gets its turn after all
        that wait."""
        requests = self._tenants.setdefault(sequence.tenant, {}).setdefault(sequence.priority, OrderedDict())
        requests.setdefault(sequence.id, {})[sequence] = None
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the front."""
        self._returned[sequence] = None
        self._returned.move_to_end(sequence, last=False)
        self._num_waiting += 1

    def first(self, is_held: Callable[[Sequence], bool]) -> Sequence | None:
        """The next sequence that is not held back; a tenant keeps its turn while its sequences are held.

        Of newcomers that are choices of one request, those behind a held one must be held as well.
        """
        return next((sequence for sequence in chain(self._returned, self._heads()) if not is_held(sequence)), None)

    def take(self, sequence: Sequence) -> None:
        """Remove it to run. Its tenant has used its turn, unless the sequence had been preempted."""
        is_turn = sequence not in self._returned
        self.remove(sequence)
        if is_turn and sequence.tenant in self._tenants:
            self._tenants.move_to_end(sequence.tenant)

    def remove(self, sequence: Sequence) -> None:
        """Remove it; no tenant loses its turn."""
        self._num_waiting -= 1
        if sequence in self._returned:
            del self._returned[sequence]
        else:
            self._remove_newcomer(sequence)

    def _remove_newcomer(self, sequence: Sequence) -> None:
        queue = self._tenants[sequence.tenant]
        requests = queue[sequence.priority]
        choices = requests[sequence.id]
        del choices[sequence]
        if not choices:
            del requests[sequence.id]
        if not requests:
            del queue[sequence.priority]
        if not queue:
            del self._tenants[sequence.tenant]

    def _newcomers(self) -> Iterator[dict[Sequence, None]]:
        """The waiting choices of every request, in turn."""
        for queue in self._tenants.values():
            for priority in sorted(queue):
                yield from queue[priority].values()

    def _heads(self) -> Iterator[Sequence]:
        """The first choice that waits of every request, in turn."""
        return (next(iter(choices)) for choices in self._newcomers())
