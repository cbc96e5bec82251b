"""The device thread: owns an engine, takes commands from an asyncio program and hands it back events.

Neither side waits for the other: commands go through a queue, events reach the loop with one hop per Step.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Event, FailureEvent, FailureReason, PromptEvent, StepReport, TokenEvent
from nvium_core.engine.failures import EngineStopped, error_of
from nvium_core.engine.params import SamplingParams

STOPPED = "the engine has stopped"
FAILED = "the engine has failed"

Key = tuple[str, int]
"""A request's id and the number of one of its choices."""

IDLE_WAIT_SECONDS = 0.5
"""How often an idle worker shows that it lives."""

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and what is asked for it."""

    token_ids: Items[int]
    params: SamplingParams

    def keys(self, sequence_id: str) -> list[Key]:
        """Of its choices, under the id that the engine knows it by."""
        first = self.params.choice
        return [(sequence_id, choice) for choice in range(first, first + self.params.num_choices)]


@dataclass(frozen=True, slots=True)
class Admittance:
    """How a choice left the queue: when, by `time.monotonic()`, and the rows of its prompt that needed no computing."""

    at: float
    num_cached_prompt_tokens: int


class TokenStream:
    """The events of some requests' choices, for the event loop that submitted them.

    It is over once every choice has ended or was cancelled. What has arrived is taken by `take`, when a listener is
    called or by waiting for `arrival`; or by iterating, which gives what `take` does and ends when the stream is over.
    Whoever has a stream must close it, to free what still runs.
    """

    def __init__(self, keys: Items[Key], cancel: Callable[[Key], None]) -> None:
        self.keys = list(keys)
        """The choices, those of the first request first."""
        self.admissions: dict[Key, Admittance] = {}
        """Of the choices that have left the queue; there by the time a choice's first token arrives."""
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._open = set(keys)
        self._events: list[Event] = []
        self._listener: Callable[[], object] = lambda: None

    @property
    def is_over(self) -> bool:
        return not self._open

    def listen(self, listener: Callable[[], object]) -> None:
        """Have it called on the loop, and only it, whenever there is something to take or the stream may be over."""
        self._listener = listener

    async def arrival(self) -> None:
        """Wait until there is something to take or the stream may be over."""
        if self._open and not self._events:
            arrived = self.loop.create_future()
            self.listen(partial(settle, arrived))
            await arrived

    def take(self) -> list[TokenEvent | PromptEvent]:
        """All that has arrived since the last time. Raises `EngineError` if a choice has failed."""
        events, self._events = self._events, []
        return list(self._wanted(events))

    def cancel(self, key: Key) -> None:
        """Cancel a choice, which has no further events; no effect once it has ended. Never blocks."""
        if key in self._open:
            self._open.remove(key)
            self._cancel(key)
            self.loop.call_soon(self._listener)  # which may be what cancels

    def close(self) -> None:
        """Cancel all that still runs."""
        for key in list(self._open):
            self.cancel(key)

    def deliver(self, events: list[Event]) -> None:
        """Called on the loop."""
        self._events += events
        self._listener()

    async def __aiter__(self) -> AsyncIterator[list[TokenEvent | PromptEvent]]:
        try:
            while self._open:
                await self.arrival()
                if told := self.take():
                    yield told
        finally:
            self.close()

    def _wanted(self, events: list[Event]) -> Iterator[TokenEvent | PromptEvent]:
        """The events of choices that are still wanted; raises for a failure."""
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
    """Wake the waiter, unless something else has."""
    if not future.done():
        future.set_result(None)


def key_of(event: Event) -> Key:
    return event.sequence_id, event.choice


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
        self.has_failed = False
        """The thread has ended, or is ending, without being stopped."""
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

    def excuse(self) -> None:
        """Count progress from now on: it could not make any while the process was stopped."""
        self._beat = time.monotonic()

    def submit(self, requests: Items[EngineRequest], tenant: str = "") -> TokenStream:
        """Queue requests, all or none, from the running event loop and without blocking it.

        Raises `InvalidRequest`, or `EngineError` once the thread has ended, at once.
        """
        for request in requests:
            self.engine.check(request.token_ids, request.params)
        by_id = {f"request-{next(self._numbers)}": request for request in requests}
        stream = TokenStream([key for name, request in by_id.items() for key in request.keys(name)], self._cancel_soon)
        self._commands.put(lambda: self._add(by_id, tenant, stream))
        if self._stopped:  # looked at last, as the thread may have ended in between and taken no more commands
            raise EngineStopped(STOPPED)
        return stream

    def _cancel_soon(self, key: Key) -> None:
        self._commands.put(lambda: self._cancel(key))

    def _loop(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_work:
                    self._step()
                self._look()
        except Exception:
            logger.exception("the device thread has failed")
            self.has_failed = True
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
        if self._observe:
            for report in self.engine.reports:
                self._observe(report)  # first: a client that has its answer must find it counted
        self._deliver(events)
        if not self.engine.has_work:
            self.engine.check_idle()

    def _fail_everything(self) -> None:
        """End every stream, those still in the queue included."""
        while not self._commands.empty():
            if command := self._commands.get():
                with suppress(Exception):  # the engine may be what is broken
                    command()
        reason: FailureReason = "failed" if self.has_failed else "stopped"
        message = FAILED if self.has_failed else STOPPED
        self._deliver([FailureEvent(name, message, choice, reason) for name, choice in self._streams])

    def _add(self, requests: dict[str, EngineRequest], tenant: str, stream: TokenStream) -> None:
        by_key = dict.fromkeys(stream.keys, stream)
        self._streams |= by_key
        self._queued |= by_key
        for sequence_id, request in requests.items():
            self.engine.add(sequence_id, request.token_ids, request.params, tenant=tenant)

    def _cancel(self, key: Key) -> None:
        self._streams.pop(key, None)
        self._queued.pop(key, None)
        self.engine.cancel(*key)

    def _note_admissions(self, when: float) -> None:
        """Notify the streams whose sequences were admitted by the last Step."""
        for sequence in self.engine.scheduler.admitted:
            key = (sequence.id, sequence.choice)
            if stream := self._queued.pop(key, None):
                stream.admissions[key] = Admittance(when, sequence.num_cached_prompt_tokens or 0)

    def _deliver(self, events: list[Event]) -> None:
        """Hand events to their streams, with one call into each loop concerned."""
        deliveries: defaultdict[TokenStream, list[Event]] = defaultdict(list)
        for event in events:
            key = key_of(event)
            if stream := self._streams.get(key):
                deliveries[stream].append(event)
                if isinstance(event, FailureEvent) or event.finish_reason:
                    del self._streams[key]
        for loop in {stream.loop for stream in deliveries}:
            with suppress(RuntimeError):  # a loop that has closed wants nothing more
                loop.call_soon_threadsafe(hand_over, {s: told for s, told in deliveries.items() if s.loop is loop})

    def _look(self) -> None:
        """Refresh the snapshot and the heartbeat."""
        self.state = state_of(self.engine)
        self._beat = time.monotonic()


def hand_over(deliveries: dict[TokenStream, list[Event]]) -> None:
    """On the loop: put the events into their streams."""
    for stream, events in deliveries.items():
        stream.deliver(events)


def state_of(engine: Engine) -> WorkerState:
    scheduler = engine.scheduler
    return WorkerState(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_deferred_rows=sum(sequence.num_deferred_rows for sequence in scheduler.running),
        num_preemptions=scheduler.num_preemptions,
        num_cached_prompt_tokens=scheduler.pool.num_rows_found,
        kv_cache_usage=scheduler.pool.usage,
        piggyback_speedup=engine.speedup.ratio,
    )
