"""Admission: a bound on the choices that run and wait, and no more of them once the server drains."""

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import RETRY_STOPPED_SECONDS, InvalidField, Overloaded

RETRY_QUEUE_SECONDS = 1


class Admission:
    """Counts choices from admission to their end. Lives on the event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_present = 0
        self.is_draining = False

    def enter(self, num_choices: int) -> None:
        """Admit a request's choices, all or none. Raises `InvalidField` or `Overloaded`."""
        if num_choices > self.capacity:
            raise InvalidField(
                "n", f"{num_choices} choices (prompts × n) are more than the {self.capacity} accepted at once"
            )
        if self.is_draining:
            raise draining()
        if self.num_present + num_choices > self.capacity:
            message = f"the queue is full: {self.num_present} choices are running or waiting, of {self.capacity}"
            raise Overloaded(message, code="queue_full", retry_after_seconds=RETRY_QUEUE_SECONDS)
        self.num_present += num_choices

    @contextmanager
    def entered(self, num_choices: int) -> Iterator[None]:
        """Admit choices before any work is done for them; they leave at once if that fails, else as they end."""
        self.enter(num_choices)
        try:
            yield
        except BaseException:
            self.leave(num_choices)
            raise

    def leave(self, num_choices: int = 1) -> None:
        self.num_present -= num_choices
        assert self.num_present >= 0

    def drain(self) -> None:
        """Admit nothing from now on."""
        self.is_draining = True


def draining() -> Overloaded:
    return Overloaded("the server is shutting down", code="draining", retry_after_seconds=RETRY_STOPPED_SECONDS)
