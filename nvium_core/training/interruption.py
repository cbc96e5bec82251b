"""Defer SIGINT and SIGTERM to the end of a step."""

import signal
from types import FrameType


class Interruption:
    """A context that records the first SIGINT or SIGTERM. The second one has its usual effect."""

    def __init__(self) -> None:
        self.is_requested = False

    def __enter__(self) -> "Interruption":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
