"""The queue of waiting sequences, in which tenants take turns.

Within a tenant the earliest request goes first. Preempted sequences go before all other sequences. `first` takes time
in proportion to the held requests. All other operations take constant time.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain

from nvium_core.engine.schedule.sequence import Sequence

Requests = dict[str, dict[Sequence, None]]
"""The waiting choices of each request, by request id, in order of arrival."""


class WaitingQueue:
    def __init__(self) -> None:
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        """Preempted sequences, most recent first."""
        self._tenants: OrderedDict[str, Requests] = OrderedDict()
        """Queue of each tenant, in the order of their turns."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, chain.from_iterable(self._new_requests()))

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence to its tenant's queue. A new tenant gets the last turn."""
        requests = self._tenants.setdefault(sequence.tenant, {})
        requests.setdefault(sequence.request_id, {})[sequence] = None
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        self._preempted[sequence] = None
        self._preempted.move_to_end(sequence, last=False)
        self._num_waiting += 1

    def first(self, is_held: Callable[[Sequence], bool]) -> Sequence | None:
        """Return the next sequence for which `is_held` is False. While all sequences of a tenant are held, the tenant
        keeps its turn. If a choice of a request is held, its later choices must be held too."""
        heads = (next(iter(choices)) for choices in self._new_requests())
        return next((sequence for sequence in chain(self._preempted, heads) if not is_held(sequence)), None)

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
