"""The device thread: owns an engine, takes commands from an asyncio program and hands it back events.

Neither side waits for the other: commands go through a queue, events reach the loop with one hop per Step.
"""

import asyncio
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from nvium_core.engine.engine import Engine, EngineError
from nvium_core.engine.events import Event, FailureEvent, PromptEvent, StepReport, TokenEvent
from nvium_core.engine.params import SamplingParams

STOPPED = "the engine has stopped"

Key = tuple[str, int]
"""A request's id and the number of one of its choices."""

IDLE_WAIT_SECONDS = 0.5
"""How often an idle worker shows that it lives."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A snapshot for gauges and health checks, taken by the device thread between Steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred_rows: int = 0
    num_preemptions: int = 0
    num_cached_prompt_tokens: int = 0
    kv_cache_usage: float = 0.0
    piggyback_speedup: float = math.nan
    """Time the same tokens would have taken block by block at full depth, over time spent; nan before any Step."""


class TokenStream:
    """What one choice of a request tells, for the event loop that submitted it.

    Iterating gives lists of events, each with all that arrived since the last; it ends after the event with a finish
    reason, or with `EngineError`. Closing or cancelling the iteration frees the sequence.
    """

    def __init__(self, sequence_id: str, choice: int, cancel: Callable[[], None]) -> None:
        self.sequence_id = sequence_id
        self.choice = choice
        self.admitted_at: float | None = None
        """When the sequence left the queue, by `time.monotonic()`; known by the time its first token arrives."""
        self.num_cached_prompt_tokens: int | None = None
        """Rows of the prompt that needed no computing, known as soon."""
        self._cancel = cancel
        self.loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._done = False

    def cancel(self) -> None:
        """Free the sequence; without effect once it has ended. Never blocks."""
        if not self._done:
            self._done = True
            self._arrived.set()
            self._cancel()

    def deliver(self, events: list[Event]) -> None:
        """Called on the loop."""
        self._events += events
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent | PromptEvent]]:
        try:
            while not self._done:
                await self._arrived.wait()
                self._arrived.clear()
                events, self._events = self._events, []
                told = [event for event in events if not isinstance(event, FailureEvent)]
                failures = [event for event in events if isinstance(event, FailureEvent)]
                self._done |= bool(failures) or any(event.finish_reason for event in told)
                if told:
                    yield told
                if failures:
                    raise EngineError(failures[0].message)
        finally:
            self.cancel()


class EngineWorker:
    """Runs an engine on a thread of its own. `observe`, if given, gets every `StepReport`, on that thread."""

    def __init__(self, engine: Engine, observe: Callable[[StepReport], None] | None = None) -> None:
        self.engine = engine
        self.state = WorkerState()
        self._observe = observe
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[Key, TokenStream] = {}
        self._queued: dict[Key, TokenStream] = {}
        self._numbers = count()
        self._stopped = False
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="nvium-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after its current Step; running requests fail."""
        self._commands.put(None)
        self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds_since_progress(self) -> float:
        """Age of the last Step, or of the last look at an empty queue."""
        return time.monotonic() - self._beat

    def submit(self, token_ids: Tokens[int], params: SamplingParams, tenant: str = "") -> list[TokenStream]:
        """Queue a request from the running event loop, without blocking it; a stream for each of its choices.

        Raises `InvalidRequest`, or `EngineError` once the thread has ended, at once.
        """
        self.engine.check(token_ids, params)
        sequence_id = f"request-{next(self._numbers)}"
        choices = range(params.choice, params.choice + params.num_choices)
        streams = [TokenStream(sequence_id, choice, partial(self.cancel, sequence_id, choice)) for choice in choices]
        self._commands.put(lambda: self._add(streams, token_ids, params, tenant))
        if self._stopped:  # looked at last, as the thread may have ended in between and taken no more commands
            raise EngineError(STOPPED)
        return streams

    def cancel(self, sequence_id: str, choice: int) -> None:
        """Free a choice, soon; without effect once it has ended. Never blocks."""
        self._commands.put(lambda: self._cancel(sequence_id, choice))

    def _loop(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_work:
                    self._step()
                self._look()
        finally:
            self._stopped = True
            self._fail_everything()

    def _take_commands(self) -> bool:
        """Carry out queued commands, waiting a while for one if there is nothing else to do; False to stop."""
        try:
            command = self._commands.get(block=not self.engine.has_work, timeout=IDLE_WAIT_SECONDS)
            while command is not None:
                command()
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            return True

    def _step(self) -> None:
        started = time.monotonic()
        events = self.engine.step()
        self._note_admissions(started)
        if self._observe and self.engine.last_report:
            self._observe(self.engine.last_report)  # first, so that whoever has an answer finds it counted
        self._deliver(events)
        if not self.engine.has_work:
            self.engine.check_idle()

    def _fail_everything(self) -> None:
        """End every stream, those still in the queue included."""
        while not self._commands.empty():
            if command := self._commands.get():
                command()
        self._deliver([FailureEvent(sequence_id, STOPPED, choice) for sequence_id, choice in self._streams])

    def _add(self, streams: list[TokenStream], token_ids: Tokens[int], params: SamplingParams, tenant: str) -> None:
        by_choice = {(stream.sequence_id, stream.choice): stream for stream in streams}
        self._streams |= by_choice
        self._queued |= by_choice
        self.engine.add(streams[0].sequence_id, token_ids, params, tenant=tenant)

    def _cancel(self, sequence_id: str, choice: int) -> None:
        self._streams.pop((sequence_id, choice), None)
        self._queued.pop((sequence_id, choice), None)
        self.engine.cancel(sequence_id, choice)

    def _note_admissions(self, when: float) -> None:
        """Stamp the streams whose sequences the last Step was the first to let in."""
        for sequence in self.engine.scheduler.admitted:
            if stream := self._queued.pop((sequence.id, sequence.choice), None):
                stream.admitted_at = when
                stream.num_cached_prompt_tokens = sequence.num_cached_prompt_tokens

    def _deliver(self, events: list[Event]) -> None:
        """Hand events to their streams, with one call into each loop concerned."""
        per_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, Event]]] = defaultdict(list)
        for event in events:
            key = (event.sequence_id, event.choice)
            if stream := self._streams.get(key):
                per_loop[stream.loop].append((stream, event))
                if isinstance(event, FailureEvent) or event.finish_reason:
                    del self._streams[key]
        for loop, deliveries in per_loop.items():
            with suppress(RuntimeError):  # a loop that has closed wants nothing more
                loop.call_soon_threadsafe(hand_over, deliveries)

    def _look(self) -> None:
        """Refresh the snapshot and the heartbeat."""
        scheduler = self.engine.scheduler
        self.state = WorkerState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_deferred_rows=sum(sequence.num_deferred_rows for sequence in scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            num_cached_prompt_tokens=scheduler.pool.num_rows_found,
            kv_cache_usage=scheduler.pool.usage,
            piggyback_speedup=self.engine.speedup.ratio,
        )
        self._beat = time.monotonic()


def hand_over(deliveries: list[tuple[TokenStream, Event]]) -> None:
    """On the loop: put each event into its stream."""
    for stream, event in deliveries:
        stream.deliver([event])
