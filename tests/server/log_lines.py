"""Captures the log lines of a server in this process."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import structlog

from server.telemetry.logs import configure_logs, sink

WRITTEN_SECONDS = 30


class LogLines:
    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        sink.drain(WRITTEN_SECONDS)
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines, parsed as JSON."""
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("request_id") == request_id]


@contextmanager
def log_lines() -> Iterator[LogLines]:
    """Capture log lines while the context is open, then restore the configuration."""
    written, before, handlers = LogLines(), structlog.get_config(), logging.root.handlers[:]
    level, hooks = logging.root.level, (sys.excepthook, threading.excepthook, sys.unraisablehook)
    with redirect_stderr(written.stream):
        configure_logs()
    try:
        yield written
    finally:
        sink.drain(WRITTEN_SECONDS)
        structlog.configure(**before)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
