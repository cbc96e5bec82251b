"""The engine in a process of its own, so that its Python and the event loop's do not wait for each other.

Commands go down a pipe and what each Step brought comes up, read by the event loop itself. The child ends when the
pipe does, so it never outlives its parent; when the child ends, all that runs fails at once.
"""

import asyncio
import logging
import marshal
import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from itertools import count, islice
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Event, FailureEvent, FailureReason, StepReport, TokenEvent
from nvium_core.engine.failures import EngineStopped
from nvium_core.engine.limits import Limits
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.worker import (
    FAILED,
    IDLE_WAIT_SECONDS,
    STOPPED,
    Admittance,
    EngineRequest,
    Key,
    TokenStream,
    WorkerState,
    key_of,
    state_of,
)

WARM_UP_TOKENS = 4
MAX_CALIBRATION_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Calibrated(NamedTuple):
    """What an engine measured when it was warmed up: seconds of a block, and of each of its rows."""

    seconds: float
    fixed: list[float]
    per_row: list[float]
    max_native_rows: int
    processor: str


class Added(NamedTuple):
    requests: dict[str, EngineRequest]
    tenant: str


class Told(NamedTuple):
    """The outcome of a Step, or of an idle poll of the pipe."""

    admissions: dict[Key, Admittance]
    events: list[Event]
    reports: list[StepReport]
    state: WorkerState


def warm_up(engine: Engine) -> Calibrated:
    """Run a few tokens through every block, and measure what Steps cost."""
    num_tokens = min(WARM_UP_TOKENS, engine.context - 1)
    engine.generate([[0]], SamplingParams(max_tokens=num_tokens, seed=0, ignore_eos=True))
    started = time.monotonic()
    costs = engine.calibrate(max_seconds=MAX_CALIBRATION_SECONDS, remembers=True)
    seconds = time.monotonic() - started
    runner = engine.runner
    return Calibrated(
        seconds, list(costs.fixed), list(costs.per_row), runner.backend.max_native_rows, str(runner.processor)
    )


def child(pipe: Connection, build: Callable[[], Engine]) -> None:
    """The process: signals are its parent's business."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    engine = build()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe.send(warm_up(engine))
        while take_commands(engine, pipe):
            told = step(engine) if engine.has_work else Told({}, [], [], state_of(engine))
            pipe.send_bytes(written(told))


def take_commands(engine: Engine, pipe: Connection) -> bool:
    """Carry out what has arrived, waiting a while if there is nothing else to do; False to stop."""
    while pipe.poll(0 if engine.has_work else IDLE_WAIT_SECONDS):
        command: Added | Key | None = pipe.recv()
        if command is None:
            return False
        if isinstance(command, Added):
            for sequence_id, request in command.requests.items():
                engine.add(sequence_id, request.token_ids, request.params, tenant=command.tenant)
        else:
            engine.cancel(*command)
    return True


def step(engine: Engine) -> Told:
    started = time.monotonic()
    events = engine.step()
    admissions = {
        (sequence.id, sequence.choice): Admittance(started, sequence.num_cached_prompt_tokens or 0)
        for sequence in engine.scheduler.admitted
    }
    if not engine.has_work:
        engine.check_idle()
    return Told(admissions, events, engine.reports, state_of(engine))


def written(told: Told) -> bytes:
    """By marshal, which takes a fifth of pickle's time for tokens; whatever is rarer is pickled within.

    The events of all reports, one after another, are the events.
    """
    events: bytes | list[tuple[Any, ...]]
    if all(type(event) is TokenEvent and event.score is None for event in told.events):
        events = [tuple(event) for event in told.events]  # type: ignore[arg-type]
    else:
        events = pickle.dumps(told.events)
    admissions = [(*key, *astuple(admittance)) for key, admittance in told.admissions.items()]
    reports = [(r.block, r.num_rows, r.num_sequences, r.seconds, len(r.events)) for r in told.reports]
    state = [getattr(told.state, name) for name in WorkerState.__slots__]
    return marshal.dumps((admissions, events, reports, state))


def read(message: bytes) -> Told:
    """What was written."""
    admissions, packed, told_reports, state = marshal.loads(message)  # noqa: S302 (from our own child)
    events: list[Event] = pickle.loads(packed) if isinstance(packed, bytes) else [TokenEvent(*each) for each in packed]  # noqa: S301
    rest = iter(events)
    reports = [
        StepReport(block, num_rows, num_sequences, seconds, list(islice(rest, number)))
        for block, num_rows, num_sequences, seconds, number in told_reports
    ]
    by_key = {(name, choice): Admittance(at, cached) for name, choice, at, cached in admissions}
    return Told(by_key, events, reports, WorkerState(*state))


class EngineProcess:
    """What `EngineWorker` is, in a process. `build` must be picklable; `observe` is called on the event loop."""

    def __init__(
        self, limits: Limits, build: Callable[[], Engine], observe: Callable[[StepReport], None] | None = None
    ) -> None:
        self.state = WorkerState()
        self.has_failed = False
        """The process has ended without being stopped."""
        self._limits = limits
        self._observe = observe
        self._streams: dict[Key, TokenStream] = {}
        self._numbers = count()
        self._is_stopping = self._has_ended = False
        self._beat = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=child, args=(self._theirs, build), name="nvium-engine", daemon=True)
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="nvium-commands")

    def launch(self) -> Calibrated:
        """Start the process, and wait until it is warm. Raises `EngineStopped` if it ends before."""
        self._process.start()
        self._theirs.close()
        try:
            calibrated: Calibrated = self._pipe.recv()
        except EOFError:
            raise EngineStopped("the engine's process ended while it was starting") from None
        return calibrated

    def start(self) -> None:
        """Listen to the process, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._read)
        self._beat = time.monotonic()

    def stop(self, timeout: float | None = None) -> None:
        """End the process after its current Step, or by force when that takes longer; running requests fail."""
        self._is_stopping = True
        self._send(pickle.dumps(None))
        self._process.join(timeout)
        self._process.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._has_ended and self._process.is_alive()

    @property
    def seconds_since_progress(self) -> float:
        """Age of the last Step, or of the last look at an empty pipe."""
        return time.monotonic() - self._beat

    def excuse(self) -> None:
        """Count progress from now on: it could not make any while the process was stopped."""
        self._beat = time.monotonic()

    def submit(self, requests: Items[EngineRequest], tenant: str = "") -> TokenStream:
        """Queue requests, all or none, from the event loop and without blocking it.

        Raises `InvalidRequest`, or `EngineError` once the process has ended, at once.
        """
        for request in requests:
            self._limits.check(request.token_ids, request.params)
        if self._has_ended:
            raise EngineStopped(STOPPED)
        by_id = {f"request-{next(self._numbers)}": request for request in requests}
        command = pickle.dumps(Added(by_id, tenant))
        stream = TokenStream([key for name, request in by_id.items() for key in request.keys(name)], self._cancel)
        self._streams |= dict.fromkeys(stream.keys, stream)
        self._send(command)
        return stream

    def _cancel(self, key: Key) -> None:
        self._streams.pop(key, None)
        self._send(pickle.dumps(key))

    def _send(self, command: bytes) -> None:
        """From a thread, as the pipe may be full. A process that has ended takes no commands, and is noticed."""

        def write() -> None:
            with suppress(OSError):
                self._pipe.send_bytes(command)

        self._sending.submit(write)

    def _read(self) -> None:
        """On the loop: read what the process sent."""
        try:
            while self._pipe.poll():
                self._take(read(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._end()

    def _take(self, told: Told) -> None:
        self.state, self._beat = told.state, time.monotonic()
        for key, admittance in told.admissions.items():
            if stream := self._streams.get(key):
                stream.admissions[key] = admittance
        if self._observe:
            for report in told.reports:
                self._observe(report)
        self._deliver(told.events)

    def _deliver(self, events: list[Event]) -> None:
        deliveries: dict[TokenStream, list[Event]] = {}
        for event in events:
            key = key_of(event)
            if stream := self._streams.get(key):
                deliveries.setdefault(stream, []).append(event)
                if isinstance(event, FailureEvent) or event.finish_reason:
                    del self._streams[key]
        for stream, told in deliveries.items():
            stream.deliver(told)

    def _end(self) -> None:
        """The process is gone, and all that ran with it."""
        self._loop.remove_reader(self._pipe.fileno())
        self._has_ended, self.has_failed = True, not self._is_stopping
        if self.has_failed:
            logger.error("the engine's process has ended by itself")
        reason: FailureReason = "failed" if self.has_failed else "stopped"
        message = FAILED if self.has_failed else STOPPED
        self._deliver([FailureEvent(name, message, choice, reason) for name, choice in self._streams])
