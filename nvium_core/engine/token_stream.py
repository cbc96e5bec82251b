"""Requests that an asyncio program submits to an engine, and the stream of their events."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from nvium_core.engine.events import Event, FailureEvent, PromptEvent, TokenEvent
from nvium_core.engine.failures import EngineError

ChoiceKey = tuple[str, int]
"""A request's id and the index of one of its choices."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """When a choice was admitted (`time.monotonic()`), and how many of its prompt tokens came from the prefix cache."""

    at: float
    num_cached_prompt_tokens: int


class TokenStream:
    """Events of requests that were submitted together. Use it only on the event loop that submitted them.

    The stream is over when every choice has ended or was cancelled. Call `take` from a listener, or after awaiting
    `arrival`. Finally, call `close`, which cancels unfinished choices.
    """

    def __init__(
        self, keys: Items[ChoiceKey], cancel: Callable[[ChoiceKey], None], on_close: Callable[["TokenStream"], None]
    ) -> None:
        self.keys = list(keys)
        """All choices, in the order of the requests."""
        self.admissions: dict[ChoiceKey, Admitted] = {}
        """Set before a choice's first token arrives."""
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._on_close = on_close
        self._open = set(keys)
        self._events: list[Event] = []
        self._listener: Callable[[], object] = lambda: None

    @property
    def is_over(self) -> bool:
        return not self._open

    def listen(self, listener: Callable[[], object]) -> None:
        """Set the only listener. The event loop calls it when events arrive or a choice is cancelled."""
        self._listener = listener

    async def arrival(self) -> None:
        """Wait until `take` has events to return, a choice is cancelled, or the stream is over."""
        if self._open and not self._events:
            arrived = asyncio.Event()
            self.listen(arrived.set)
            await arrived.wait()

    def take(self) -> dict[ChoiceKey, list[TokenEvent | PromptEvent]]:
        """Return each choice's events since the last call. Raise `EngineError` if a choice failed before any of them.

        If a choice failed after some of them, the next call raises.
        """
        events, self._events = self._events, []
        taken: dict[ChoiceKey, list[TokenEvent | PromptEvent]] = {}
        for number, event in enumerate(events):
            key = key_of(event)
            if key not in self._open:
                continue
            if isinstance(event, FailureEvent):
                if taken:
                    self._events = events[number:]
                    self.loop.call_soon(self._listener)
                    return taken
                self._open.remove(key)
                raise event.error
            if event.finish_reason:
                self._open.remove(key)
            taken.setdefault(key, []).append(event)
        return taken

    def cancel(self, key: ChoiceKey) -> None:
        """Cancel a choice without blocking. It gets no more events. Do nothing if the choice has ended."""
        if key in self._open:
            self._open.remove(key)
            self._cancel(key)
            self.loop.call_soon(self._listener)  # a direct call might recurse: the listener may be the caller

    def close(self) -> None:
        for key in list(self._open):
            self.cancel(key)
        self._on_close(self)

    def failures(self, error: EngineError) -> list[Event]:
        """Return a failure event for every choice. `take` ignores the events of choices that have already ended."""
        return [FailureEvent(request_id, error, choice) for request_id, choice in self.keys]

    def deliver(self, events: list[Event]) -> None:
        """Append events; called on the event loop."""
        self._events += events
        self._listener()


def key_of(event: Event) -> ChoiceKey:
    return event.request_id, event.choice
