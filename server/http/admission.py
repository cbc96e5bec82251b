"""Admission: a bound on the choices that run and wait, shared by keys, and none once the server drains."""

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import RETRY_STOPPED_SECONDS, InvalidField, Overloaded
from server.http.shares import Shares

RETRY_QUEUE_SECONDS = 1


class Admission:
    """Counts choices from admission to their end, by key. Lives on the event loop."""

    def __init__(self, capacity: int) -> None:
        self._shares = Shares(capacity)
        self.is_draining = False

    @property
    def num_present(self) -> int:
        return self._shares.num_held

    def enter(self, num_choices: int, key: str = "") -> None:
        """Admit a request's choices, all or none. Raises `InvalidField` or `Overloaded`."""
        capacity = self._shares.capacity
        if num_choices > capacity:
            raise InvalidField(
                "n", f"{num_choices} choices (prompts × n) are more than the {capacity} accepted at once"
            )
        if self.is_draining:
            raise draining()
        if not self._shares.fits(num_choices, key):
            is_full = self.num_present + num_choices > capacity
            reason = "the queue is full" if is_full else "the rest of the queue is for other keys"
            message = f"{reason}: {self.num_present} choices are running or waiting, of {capacity}"
            raise Overloaded(message, code="queue_full", retry_after_seconds=RETRY_QUEUE_SECONDS)
        self._shares.take(num_choices, key)

    @contextmanager
    def entered(self, num_choices: int, key: str) -> Iterator[None]:
        """Admit choices before any work is done for them; they leave at once if that fails, else as they end."""
        self.enter(num_choices, key)
        try:
            yield
        except BaseException:
            self.leave(num_choices, key)
            raise

    def leave(self, num_choices: int = 1, key: str = "") -> None:
        self._shares.give_back(num_choices, key)

    def drain(self) -> None:
        """Refuse all further requests."""
        self.is_draining = True


def draining() -> Overloaded:
    return Overloaded("the server is shutting down", code="draining", retry_after_seconds=RETRY_STOPPED_SECONDS)
