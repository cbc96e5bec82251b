"""Log lines on stderr: JSON, or sentences at a terminal.

An exception's message may quote a request, so exceptions are logged by type and place. Only exceptions in the engine's
own lines keep their messages, as the engine knows no text.
"""

import logging
import math
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from server.telemetry.human import in_words
from server.telemetry.sink import sink

ENGINE = "nvium_core"
MAX_CAUSES = 10
"""Longest chain of causes that is logged."""


def configure_logs(level: str = "info") -> None:
    """Configure logging of the whole process; lines of the standard library look the same."""
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
        logger_factory=structlog.WriteLoggerFactory(sink),  # type: ignore[arg-type]
    )
    sink.open(sys.stderr)
    handler = logging.StreamHandler(sink)
    foreign: list[Processor] = [without_reprs, *shared]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=foreign, processor=renderer))
    logging.basicConfig(level=max(logging.WARNING, least), handlers=[handler], force=True)
    take_over_from_interpreter()


def take_over_from_interpreter() -> None:
    """Log warnings and unhandled exceptions. Written to stderr by the interpreter, they could block the process."""

    def log_arguments(error: "threading.ExceptHookArgs | sys.UnraisableHookArgs") -> None:
        log_unhandled((error.exc_type, error.exc_value, error.exc_traceback))

    logging.captureWarnings(True)
    sys.excepthook = lambda *error: log_unhandled(error)
    threading.excepthook = sys.unraisablehook = log_arguments


def log_unhandled(error: tuple[type[BaseException], BaseException | None, TracebackType | None]) -> None:
    """Log an exception; SystemExit and KeyboardInterrupt are not errors."""
    if not issubclass(error[0], (SystemExit, KeyboardInterrupt)):
        structlog.get_logger("nvium.server").error("an unhandled exception", exc_info=error)


class SeldomLine:
    """A warning logged at most once a second, with the number of times it occurred since the last line."""

    def __init__(self, event: str, seconds: float = 1) -> None:
        self._event = event
        self._seconds = seconds
        self._told_at = -math.inf
        self._times = 0

    def tell(self, **fields: Any) -> None:
        self._times += 1
        now = time.monotonic()
        if now >= self._told_at + self._seconds:
            structlog.get_logger("nvium.server").warning(self._event, times=self._times, **fields)
            self._told_at, self._times = now, 0


def without_reprs(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep the first line of asyncio's messages; the others show tasks with their exceptions."""
    if event["_record"].name == "asyncio":
        event["event"] = event["event"].partition("\n")[0]
    return event


def add_exception(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add a line's exception as text."""
    is_engine = "_record" in event and event["_record"].name.startswith(ENGINE)
    add = structlog.processors.format_exc_info if is_engine else add_types_and_places
    return add(logger, method, event)


def types_and_places(exc_info: ExcInfo) -> str:
    """An exception after its causes, the first cause first, without their messages."""
    shown: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None and len(shown) < MAX_CAUSES:
        shown.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__qualname__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(reversed(shown))


add_types_and_places = structlog.processors.ExceptionRenderer(types_and_places)
