"""What an asyncio program submits to an engine, and the event stream that it gets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

from nvium_core.engine.events import Event, FailureEvent, FailureReason, PromptEvent, TokenEvent
from nvium_core.engine.failures import error_of
from nvium_core.engine.params import SamplingParams

ChoiceKey = tuple[str, int]
"""A request's id and the number of one of its choices."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and its parameters; `priority` and `cache_salt` as `Engine.add` takes them."""

    token_ids: Items[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""

    @property
    def placed(self) -> dict[str, Any]:
        return {"priority": self.priority, "cache_salt": self.cache_salt}

    def keys(self, sequence_id: str) -> list[ChoiceKey]:
        """The keys of its choices, under the id that the engine knows it by."""
        first = self.params.choice
        return [(sequence_id, choice) for choice in range(first, first + self.params.num_choices)]


@dataclass(frozen=True, slots=True)
class Admitted:
    """When a choice was admitted, by `time.monotonic()`, and its cached prompt rows."""

    at: float
    num_cached_prompt_tokens: int


class TokenStream:
    """The events of the choices of some requests, for the event loop that submitted them.

    Over once every choice has ended or was cancelled. `take` gives the events that have arrived: call it from a
    listener or after waiting for `arrival`. Iterating gives what `take` gives and ends with the stream. Must be
    closed; closing cancels unfinished choices.
    """

    def __init__(
        self, keys: Items[ChoiceKey], cancel: Callable[[ChoiceKey], None], on_close: Callable[["TokenStream"], None]
    ) -> None:
        self.keys = list(keys)
        """The choices, those of the first request first."""
        self.admissions: dict[ChoiceKey, Admitted] = {}
        """Admissions of choices; present by the time a choice's first token arrives."""
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
        """Call this on the loop, in place of any earlier listener, when events arrive or the stream may be over."""
        self._listener = listener

    async def arrival(self) -> None:
        """Wait until events have arrived or the stream may be over."""
        if self._open and not self._events:
            arrived = self.loop.create_future()
            self.listen(partial(settle, arrived))
            await arrived

    def take(self) -> list[TokenEvent | PromptEvent]:
        """The events that arrived since the last call. Raises `EngineError` if a choice has failed."""
        events, self._events = self._events, []
        return list(self._wanted(events))

    def cancel(self, key: ChoiceKey) -> None:
        """Free a choice, which gets no more events; without effect once it has ended. Never blocks."""
        if key in self._open:
            self._open.remove(key)
            self._cancel(key)
            self.loop.call_soon(self._listener)  # not at once: the listener may be the caller

    def close(self) -> None:
        """Cancel unfinished choices."""
        for key in list(self._open):
            self.cancel(key)
        self._on_close(self)

    def failures(self, message: str, reason: FailureReason) -> list[Event]:
        """Called by the worker, for every choice: it does not know which have ended."""
        return [FailureEvent(name, message, choice, reason) for name, choice in self.keys]

    def deliver(self, events: list[Event]) -> None:
        """Called on the loop."""
        self._events += events
        self._listener()

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent | PromptEvent]]:
        try:
            while self._open:
                await self.arrival()
                if events := self.take():
                    yield events
        finally:
            self.close()

    def _wanted(self, events: list[Event]) -> Iterator[TokenEvent | PromptEvent]:
        """The events of choices that have not ended; raises for a failure."""
        for event in events:
            key = key_of(event)
            if key not in self._open:
                continue
            if isinstance(event, FailureEvent):
                self._open.remove(key)
                raise error_of(event)
            if event.finish_reason:
                self._open.remove(key)
            yield event


def settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def key_of(event: Event) -> ChoiceKey:
    return event.sequence_id, event.choice
