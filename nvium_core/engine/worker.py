"""Runs an engine on its own thread, so that the engine and the asyncio program do not block each other.

The program gets the events of its requests as a stream.
"""

import asyncio
import logging
import math
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from nvium_core.engine.engine import Engine
from nvium_core.engine.errors import EngineError, EngineStopped
from nvium_core.engine.events import Event, FailureEvent, PromptEvent, StepReport, TokenEvent
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule import scheduler

STOPPED = "the engine has stopped"
FAILED = "the server's model has failed and needs a restart; retry later"

OUT_OF_MEMORY = 1
"""Exit code after a MemoryError: the process exits immediately, and a supervisor restarts it."""

IDLE_WAIT_SECONDS = 0.5  # heartbeat period of an idle worker

ChoiceKey = tuple[str, int]
"""A request's id and the index of one of its choices."""

Observe = Callable[[Items[StepReport], Items[Event]], None]
"""Called with the reports and events of every Step."""

logger = logging.getLogger(__name__)


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
            key = event.request_id, event.choice
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

    def deliver(self, events: list[Event]) -> None:
        """Append events; called on the event loop."""
        self._events += events
        self._listener()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Snapshot for metrics and health checks, taken between Steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred_rows: int = 0
    num_preemptions: int = 0
    kv_cache_usage: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    eager_passes: Mapping[str, int] = field(default_factory=dict)
    """Number of passes that ran in PyTorch's operators, by the cause."""
    piggyback_speedup: float = math.nan
    """Speedup of the fastest schedule over `whole`, for the current number of sequences; nan until measured."""


class EngineWorker:
    """Queues requests for an engine and delivers the engine's events. `observe` is called on the engine's thread."""

    def __init__(self, engine: Engine, observe: Observe | None = None) -> None:
        self.engine = engine
        self.state = WorkerState()
        self.has_failed = False
        """Whether the engine has ended, or is ending, because of a failure."""
        self._observe = observe
        self._streams: dict[ChoiceKey, TokenStream] = {}
        """The stream of each unfinished choice."""
        self._open_streams = set[TokenStream]()
        """Streams that are not closed. They fail if the engine ends."""
        self._collected: defaultdict[TokenStream, list[Event]] = defaultdict(list)
        """Events that have not been handed over yet."""
        self._handed_over = -math.inf
        self._numbers = count()
        self._has_ended = False
        self._beat = time.monotonic()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="nvium-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Stop after the current Step. Unfinished requests fail."""
        self._commands.put(None)
        self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since the last Step, or since the last heartbeat of an idle worker."""
        return time.monotonic() - self._beat

    def submit(
        self, prompts: Items[Items[int]], params: SamplingParams, tenant: str = "", cache_salt: str = ""
    ) -> TokenStream:
        """Queue a request for each prompt, or none, without blocking. Call this on the running event loop.

        Raise `InvalidRequest` if a request can never be served, `EngineStopped` if the engine has ended.
        """
        for token_ids in prompts:
            self.engine.limits.check(token_ids, params)
        by_id = {f"request-{next(self._numbers)}": token_ids for token_ids in prompts}
        keys = [(name, choice) for name in by_id for choice in params.choices]
        stream = TokenStream(keys, self._cancel, self._open_streams.discard)
        self._open_streams.add(stream)

        def add() -> None:
            self._streams |= dict.fromkeys(stream.keys, stream)
            for request_id, token_ids in by_id.items():
                self.engine.add(request_id, token_ids, params, tenant=tenant, cache_salt=cache_salt)

        self._commands.put(add)
        if self._has_ended:  # check after put(): a thread that has ended runs no command
            self._open_streams.discard(stream)
            raise EngineStopped(STOPPED)
        return stream

    def _cancel(self, key: ChoiceKey) -> None:
        def cancel() -> None:
            self._streams.pop(key, None)
            self.engine.cancel(*key)

        self._commands.put(cancel)

    def _note_progress(self) -> None:
        admission, scheduler = self.engine.admission, self.engine.scheduler
        self.state = WorkerState(
            num_running=len(admission.running),
            num_waiting=len(admission.waiting),
            num_deferred_rows=sum(sequence.num_deferred_rows for sequence in admission.running),
            num_preemptions=admission.num_preemptions,
            kv_cache_usage=admission.pool.usage,
            num_draft_tokens=scheduler.drafts.num_drafted,
            num_accepted_draft_tokens=scheduler.drafts.num_accepted,
            eager_passes=self.engine.runner.eager_passes,
            piggyback_speedup=scheduler.schedules.ratio,
        )
        self._beat = time.monotonic()

    def _step(self) -> None:
        started = time.monotonic()
        events = self.engine.step()
        self._note_progress()
        for sequence in self.engine.admission.admitted:
            if stream := self._streams.get(key := (sequence.request_id, sequence.choice)):
                stream.admissions.setdefault(key, Admitted(started, sequence.num_cached_prompt_tokens or 0))
        if self._observe:
            self._observe(self.engine.reports, events)  # count tokens before clients see them
        for event in events:
            key = event.request_id, event.choice
            if stream := self._streams.get(key):
                self._collected[stream].append(event)
                if isinstance(event, FailureEvent) or event.finish_reason:
                    del self._streams[key]

    def _flush(self) -> None:
        """Hand over the collected events. Those of a lone sequence wait for up to `MULTI_STEP_SECONDS` and a Step,
        because waking the event loop takes longer than a token of a small model."""
        is_early = self._beat - self._handed_over < scheduler.MULTI_STEP_SECONDS
        if self._collected and not (is_early and self.state.num_running == 1):
            self._handed_over = self._beat
            self._hand_over(self._collected)
            self._collected = defaultdict(list)

    def _loop(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_work:
                    self._step()
                if not self.engine.has_work:
                    self.engine.check_idle()
                    self._note_progress()
                self._flush()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # a panic in a Rust library is not an Exception
            self.has_failed = True
            logger.exception("the device thread has failed")
        finally:
            self._has_ended = True
            self._hand_over(self._collected)
            error = EngineError(FAILED) if self.has_failed else EngineStopped(STOPPED)
            for stream in list(self._open_streams):  # which ignore the events of choices that have already ended
                self._hand_over({stream: [FailureEvent(name, error, choice) for name, choice in stream.keys]})

    def _take_commands(self) -> bool:
        """Run queued commands. If the engine has no work, first wait for one. Return False if the worker must stop."""
        try:
            command = self._commands.get(block=not self.engine.has_work, timeout=IDLE_WAIT_SECONDS)
            while command is not None:
                command()
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            return True

    def _hand_over(self, deliveries: Mapping[TokenStream, list[Event]]) -> None:
        def deliver(own: Mapping[TokenStream, list[Event]]) -> None:
            for stream, events in own.items():
                stream.deliver(events)

        for loop in {stream.loop for stream in deliveries}:
            own = {stream: delivery for stream, delivery in deliveries.items() if stream.loop is loop}
            with suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(deliver, own)
