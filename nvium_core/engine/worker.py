"""Runs an engine on its own thread, so that the engine and the asyncio program do not block each other."""

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
from nvium_core.engine.events import Event, FailureEvent, StepReport
from nvium_core.engine.failures import EngineError, EngineStopped
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule import scheduler
from nvium_core.engine.token_stream import Admitted, ChoiceKey, TokenStream, key_of

STOPPED = "the engine has stopped"
FAILED = "the server's model has failed and needs a restart; retry later"

OUT_OF_MEMORY = 1
"""Exit code after a MemoryError: the process exits immediately, and a supervisor restarts it."""

IDLE_WAIT_SECONDS = 0.5  # heartbeat period of an idle worker

Observe = Callable[[Items[StepReport], Items[Event]], None]
"""Called with the reports and events of every Step."""

Deliveries = Mapping[TokenStream, list[Event]]

logger = logging.getLogger(__name__)


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
        self._open_streams: dict[TokenStream, None] = {}
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
        stream = TokenStream(keys, self._cancel, self._forget)
        self._open_streams[stream] = None

        def add() -> None:
            self._streams |= dict.fromkeys(stream.keys, stream)
            for request_id, token_ids in by_id.items():
                self.engine.add(request_id, token_ids, params, tenant=tenant, cache_salt=cache_salt)

        self._commands.put(add)
        if self._has_ended:  # check after put(): a thread that has ended runs no command
            self._forget(stream)
            raise EngineStopped(STOPPED)
        return stream

    def _cancel(self, key: ChoiceKey) -> None:
        self._commands.put(lambda: self._drop(key))

    def _forget(self, stream: TokenStream) -> None:
        self._open_streams.pop(stream, None)

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
        self._collect(events)

    def _collect(self, events: Items[Event]) -> None:
        for event in events:
            key = key_of(event)
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
            self._hand_over({stream: stream.failures(error) for stream in list(self._open_streams)})

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

    def _drop(self, key: ChoiceKey) -> None:
        self._streams.pop(key, None)
        self.engine.cancel(*key)

    def _hand_over(self, deliveries: Deliveries) -> None:
        for loop in {stream.loop for stream in deliveries}:
            own = {stream: delivery for stream, delivery in deliveries.items() if stream.loop is loop}
            with suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(hand_over, own)


def hand_over(deliveries: Deliveries) -> None:
    for stream, events in deliveries.items():
        stream.deliver(events)
