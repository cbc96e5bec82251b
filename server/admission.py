"""Admission control: limits running and waiting choices and shares the limits among keys. Refuses while draining."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import RETRY_STOPPED_SECONDS, InvalidField, Rejected
from server.settings import Settings
from server.telemetry.metrics import Metrics

MULTIPLE = 3
"""A key may hold at most three times the free capacity. One busy key gets 3/4 of the capacity, two get 3/7 each."""

RETRY_QUEUE_SECONDS = 1


class Shares:
    """Divides a capacity among keys by dynamic thresholds, as network switches divide their buffers.

    A key that holds nothing may take the whole free capacity. If only one key has ever requested a share, that key may
    always take the whole free capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._held = defaultdict[str, int](int)

    def fits(self, amount: int, key: str, *, held_by_request: int = 0) -> bool:
        """Return whether a key may take `amount` more for a request. Remember that the key has requested a share.

        `held_by_request` is the amount that the request already holds.
        """
        free = self.capacity - self.num_held - amount
        is_first = self._held[key] == held_by_request
        is_alone = len(self._held) == 1
        return free >= 0 and (is_first or is_alone or self._held[key] + amount <= MULTIPLE * free)

    def acquire(self, amount: int, key: str) -> None:
        self.num_held += amount
        self._held[key] += amount

    def give_back(self, amount: int, key: str) -> None:
        self.acquire(-amount, key)
        assert self._held[key] >= 0


class Admission:
    """Counts the running and waiting choices of each key. Use it on the event loop only."""

    def __init__(self, capacity: int) -> None:
        self._shares = Shares(capacity)
        self.is_leaving = False
        """While True, the readiness probe fails."""
        self.is_draining = False
        """While True, all requests are refused."""

    @property
    def num_present(self) -> int:
        return self._shares.num_held

    def enter(self, num_choices: int, key: str = "") -> None:
        """Admit all choices of a request. Raise `InvalidField` or `Rejected` if they do not fit."""
        capacity = self._shares.capacity
        if num_choices > capacity:
            raise InvalidField(
                "n", f"the request has {num_choices} choices (prompts × n), the server accepts at most {capacity}"
            )
        if self.is_draining:
            raise draining()
        if not self._shares.fits(num_choices, key):
            is_full = self.num_present + num_choices > capacity
            reason = "the queue is full" if is_full else "the rest of the queue is reserved for other keys"
            message = f"{reason}: {self.num_present} of {capacity} choices are running or waiting"
            raise Rejected("queue_full", message, retry_after_seconds=RETRY_QUEUE_SECONDS)
        self._shares.acquire(num_choices, key)

    @contextmanager
    def entered(self, num_choices: int, key: str) -> Iterator[None]:
        """Admit choices. If the `with` block raises, release them. If not, `leave` must be called for each choice."""
        self.enter(num_choices, key)
        try:
            yield
        except BaseException:
            self.leave(num_choices, key)
            raise

    def leave(self, num_choices: int = 1, key: str = "") -> None:
        self._shares.give_back(num_choices, key)


class Drainable:
    """What an app serves and drains at shutdown: a server's service, or the gateway in front of replicas."""

    settings: Settings
    admission: Admission
    metrics: Metrics

    @property
    def has_failed(self) -> bool:
        return False

    def check_live(self) -> None:
        """Raise `ApiError` if nothing makes progress."""

    async def check_ready(self) -> None:
        """Raise `ApiError` if requests are not accepted."""

    async def metrics_page(self) -> bytes:
        return self.metrics.page()

    def tick(self) -> None:
        """Do what is due. The event loop calls this ten times a second."""

    def give_up(self) -> None:
        """Fail all open requests."""


def draining() -> Rejected:
    return Rejected("draining", "the server is shutting down", retry_after_seconds=RETRY_STOPPED_SECONDS)
