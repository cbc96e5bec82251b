"""Log lines on stderr: JSON, or sentences if stderr is a terminal.

A separate thread writes the lines, so logging never blocks and never fails. Lines are dropped and counted if the disk
is full, or if stderr is a pipe that is closed or not read.

The message of an exception may quote a request, so only the exception's type and traceback are logged. Exceptions that
the engine logs keep their messages, because the engine handles no text.
"""

import atexit
import io
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

SLOW_SECONDS = 10.0
"""In a log file, a faster phase has no line of its own, so that a wrong command line logs a single line."""

MAX_CAUSES = 10  # maximum number of chained exceptions in a log line

SENTENCES = {
    "starting": "Starting; importing PyTorch and the server …",
    "loading": "Loading {model} …",
    "loaded": "Loaded {model} in {seconds:.1f} s: {num_parameters:,} parameters, weights in {weights}, {arithmetic} on "
    "{device}.",
    "serving": "Up to {max_sequences} sequences at once, of up to {context:,} tokens; the cache holds {cache}.",
    "warming up": "Warming up …",
    "warm": "Warmed up in {seconds:.1f} s.",
    "ready": "Ready. Playground: {url}/  OpenAI's API: {url}/v1  Stop: Ctrl-C",
    "ready, no playground": "Ready. OpenAI's API: {url}/v1  Stop: Ctrl-C",
    "saying goodbye": "Accepting requests for another {seconds:g} s, while /readyz fails. Ctrl-C again stops at once.",
    "draining": "Finishing {choices} answers, for at most {seconds:g} s. Ctrl-C again stops at once.",
    "stopped": "Stopped.",
    "request": "{endpoint}: {status} {outcome}, {prompt_tokens} tokens in, {completion_tokens} out, "
    "{total_seconds:.2f} s",
    "other request": "{target}: {status} {outcome}, {total_seconds:.2f} s",
}
"""Sentence templates by event."""

HIDDEN = ("event", "level", "timestamp", "exception")

MAX_LINES = 4_000  # length of the queue of lines to write


def configure_logs(level: str = "info") -> None:
    """Configure structlog and the standard library's logging for the whole process."""
    least = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_exception,
    ]
    renderer: Processor = in_words if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_: LineLogger(),
    )
    sink.open(sys.stderr)
    handler = logging.StreamHandler(sink)
    foreign: list[Processor] = [without_reprs, *shared]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=foreign, processor=renderer))
    logging.basicConfig(level=max(logging.WARNING, least), handlers=[handler], force=True)
    logging.getLogger("nvium_core").setLevel(least)
    # if the interpreter wrote warnings and unhandled exceptions to stderr, the process could block
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: log_unhandled(error)
    threading.excepthook = lambda error: log_unhandled(error[:3])  # type, value and traceback
    sys.unraisablehook = lambda error: log_unhandled((error.exc_type, error.exc_value, error.exc_traceback))


@contextmanager
def logged_if_slow(phase: str, **fields: object) -> Iterator[None]:
    """Log a phase while it runs: at once for a user at a terminal, otherwise if it takes more than `SLOW_SECONDS`."""
    log = structlog.get_logger("nvium.server")
    timer = threading.Timer(0 if sys.stderr.isatty() else SLOW_SECONDS, log.info, [phase], fields)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_unhandled(error: tuple[type[BaseException], BaseException | None, TracebackType | None]) -> None:
    if not issubclass(error[0], (SystemExit, KeyboardInterrupt)):
        structlog.get_logger("nvium.server").error("unhandled exception", exc_info=error)


def without_reprs(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep only the first line of asyncio's messages: further lines quote the messages of exceptions."""
    if event["_record"].name == "asyncio":
        event["event"] = event["event"].partition("\n")[0]
    return event


def add_exception(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    is_engine = "_record" in event and event["_record"].name.startswith("nvium_core")
    add = structlog.processors.ExceptionRenderer(types_and_places)
    return (structlog.processors.format_exc_info if is_engine else add)(logger, method, event)


def types_and_places(exc_info: ExcInfo) -> str:
    """Format an exception and its causes as tracebacks without messages, root cause first."""
    parts: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None and len(parts) < MAX_CAUSES:
        parts.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(reversed(parts))


def in_words(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """Render an event. This is structlog's last processor."""
    level = event.get("level", "info")
    return sentence(event) if level == "info" else f"{level}: {sentence(event)}"


def sentence(event: Mapping[str, Any]) -> str:
    name = str(event.get("event", ""))
    if name == "ready" and not event.get("playground"):
        name = "ready, no playground"
    if name == "request" and event.get("target"):
        name = "other request"
    try:
        return SENTENCES[name].format_map(event)
    except (KeyError, TypeError, ValueError):  # no template, or a field is missing or None
        fields = [f"{key}={value}" for key, value in event.items() if key not in HIDDEN and value not in (None, "")]
        return "\n".join([" ".join([name, *fields]), *filter(None, [event.get("exception")])])


class LogSink:
    """A stream for log lines. `write` never raises or blocks. `num_dropped` counts the lines that were not written."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._write_out: Callable[[bytes], object] = discard
        self._lines = queue.SimpleQueue[bytes | threading.Event]()
        """Lines to write, and events to set. `put` must be reentrant: garbage collected while a line is put may log."""
        self._thread = threading.Thread(target=self._run, name="nvium-log", daemon=True)

    def open(self, stream: TextIO | None) -> None:
        """Start writing to a copy of the stream's file descriptor, which stays ours if the stream closes.

        Bypass the stream's buffer, which would keep the lines that do not fit on a full disk. If the stream is None,
        because the process has no stderr, drop all lines.
        """
        self._write_out = discard
        if stream is not None:
            try:
                self._write_out = partial(write_all, os.dup(stream.fileno()))
            except (io.UnsupportedOperation, ValueError):
                self._write_out = lambda line: stream.write(line.decode())
        if not self._thread.is_alive():
            self._thread.start()

    def write(self, line: str) -> None:
        if self._lines.qsize() < MAX_LINES:
            self._lines.put(line.encode(errors="backslashreplace"))
        else:
            self.num_dropped += 1

    def drain(self, seconds: float = 1) -> None:
        """Wait at most `seconds` until all lines are written."""
        if self._thread.is_alive():
            self._lines.put(written := threading.Event())
            written.wait(seconds)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._write_out(line)
            except Exception:
                self.num_dropped += 1


class LineLogger:
    """structlog's logger without its lock, which is not reentrant."""

    def info(self, line: str) -> None:
        sink.write(f"{line}\n")

    debug = warning = error = critical = info


def write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def discard(_: bytes) -> None:
    raise OSError


sink = LogSink()
"""The sink of this process."""

atexit.register(sink.drain)
