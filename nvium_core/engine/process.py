"""The engine in a process of its own, so that its Python and the event loop's do not wait for each other.

Commands go down a pipe and the results of each Step come up, read by the event loop itself. The child ends when the
pipe does, so it never outlives its parent. When the child ends, everything that runs in it fails at once.
"""

import asyncio
import logging
import marshal
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Event, StepReport, TokenEvent
from nvium_core.engine.failures import EngineStopped
from nvium_core.engine.limits import Limits
from nvium_core.engine.token_stream import Admitted, ChoiceKey, EngineRequest, TokenStream
from nvium_core.engine.worker import (
    IDLE_WAIT_SECONDS,
    STOPPED,
    Deliveries,
    EngineTurn,
    Observe,
    Worker,
    WorkerState,
    hand_over,
    run_turn,
)

END = pickle.dumps(None)
"""The last command."""

logger = logging.getLogger(__name__)


class Added(NamedTuple):
    requests: dict[str, EngineRequest]
    tenant: str


def child(pipe: Connection, build: Callable[[], Engine], num_dropped_lines: Callable[[], int]) -> None:
    """The process: signals are its parent's business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    engine = build()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        engine.warm_up(remembers=True)
        pipe.send(engine.runner.processor)
        while take_commands(engine, pipe):
            turn = run_turn(engine)
            state = replace(turn.state, num_dropped_lines=num_dropped_lines())
            pipe.send_bytes(encode(turn._replace(state=state)))
            if not engine.has_work:
                engine.check_idle()


def take_commands(engine: Engine, pipe: Connection) -> bool:
    """Carry out what has arrived, waiting a while if there is nothing else to do; False to stop."""
    while pipe.poll(0 if engine.has_work else IDLE_WAIT_SECONDS):
        command: Added | ChoiceKey | None = pipe.recv()
        if command is None:
            return False
        if isinstance(command, Added):
            for sequence_id, request in command.requests.items():
                engine.add(sequence_id, request.token_ids, request.params, tenant=command.tenant, **request.placed)
        else:
            engine.cancel(*command)
    return True


def encode(turn: EngineTurn) -> bytes:
    """With marshal, which takes a fifth of pickle's time for tokens; rarer events are pickled inside."""
    events: bytes | list[tuple[Any, ...]]
    if all(type(event) is TokenEvent and event.score is None for event in turn.events):
        events = [tuple(event) for event in turn.events]  # type: ignore[arg-type]
    else:
        events = pickle.dumps(turn.events)
    admissions = [(*key, *astuple(admitted)) for key, admitted in turn.admissions.items()]
    reports = [tuple(report) for report in turn.reports]
    state = [getattr(turn.state, name) for name in WorkerState.__slots__]
    return marshal.dumps((admissions, events, reports, state))


def decode(message: bytes) -> EngineTurn:
    admissions, packed, packed_reports, state = marshal.loads(message)  # noqa: S302 (from our own child)
    events: list[Event] = pickle.loads(packed) if isinstance(packed, bytes) else [TokenEvent(*each) for each in packed]  # noqa: S301
    reports = [StepReport(*report) for report in packed_reports]
    by_key = {(name, choice): Admitted(at, cached) for name, choice, at, cached in admissions}
    return EngineTurn(by_key, events, reports, WorkerState(*state))


class EngineProcess(Worker):
    """Runs an engine in a process of its own; `observe` is called on the event loop.

    `build` and `num_dropped_lines`, which counts log lines that could not be written, are called there, so they must be
    picklable.
    """

    def __init__(
        self,
        limits: Limits,
        build: Callable[[], Engine],
        observe: Observe | None = None,
        num_dropped_lines: Callable[[], int] = int,
    ) -> None:
        super().__init__(limits, observe)
        self._is_stopping = False
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        given = (self._theirs, build, num_dropped_lines)
        self._process = context.Process(target=child, args=given, name="nvium-engine", daemon=True)
        self._commands: SimpleQueue[bytes] = SimpleQueue()
        self._sending = threading.Thread(target=self._send_all, name="nvium-commands", daemon=True)

    def launch(self) -> str:
        """Start the process and wait until it is warm. Returns `Runner.processor`; raises `EngineStopped`."""
        self._process.start()
        self._sending.start()
        self._theirs.close()
        try:
            processor: str = self._pipe.recv()
        except EOFError:
            raise EngineStopped("the engine's process ended while it was starting") from None
        return processor

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._read)
        self._beat = time.monotonic()

    def stop(self, timeout: float | None = None) -> None:
        """As for every worker, but kills the process after the timeout."""
        self._is_stopping = True
        self._commands.put(END)
        self._process.join(timeout)
        self._process.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._has_ended and self._process.is_alive()

    def _queue(self, requests: dict[str, EngineRequest], tenant: str, stream: TokenStream) -> None:
        if self._has_ended:
            raise EngineStopped(STOPPED)
        command = pickle.dumps(Added(requests, tenant))
        self._streams |= dict.fromkeys(stream.keys, stream)
        self._commands.put(command)

    def _cancel(self, key: ChoiceKey) -> None:
        self._streams.pop(key, None)
        self._commands.put(pickle.dumps(key))

    def _send_all(self) -> None:
        """On a thread, as the pipe may be full. That a process has ended is noticed where it is read from."""
        command = b""
        try:
            while command != END:
                self._pipe.send_bytes(command := self._commands.get())
        except OSError:
            return
        except BaseException:
            self.has_failed = True  # a command is lost
            raise

    def _read(self) -> None:
        """Called on the loop when the pipe has something."""
        try:
            while self._pipe.poll():
                self._take(decode(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._end()

    def _hand_over(self, deliveries: Deliveries) -> None:
        hand_over(deliveries)

    def _end(self) -> None:
        """The process is gone; everything that ran in it fails."""
        self._loop.remove_reader(self._pipe.fileno())
        self._has_ended = True
        self.has_failed |= not self._is_stopping
        self._fail_streams()
        if self.has_failed:
            logger.error("the engine's process has ended by itself, or was lost")
