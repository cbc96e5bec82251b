"""Writes log lines on a separate thread, so logging never blocks and never fails.

Lines are dropped and counted if the disk is full, or if stderr is a pipe that is closed or not read.
"""

import atexit
import io
import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

MAX_LINES = 4_000  # length of the queue of lines to write
EXIT_SECONDS = 1  # timeout for writing the queued lines at exit

Write = Callable[[bytes], object]


class LogSink:
    """A stream for log lines. `write` never raises or blocks. `num_dropped` counts the lines that were not written."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._write_out: Write = discard
        self._lines = queue.SimpleQueue[bytes | threading.Event]()
        """Lines to write, and events to set. `put` must be reentrant: garbage collected while a line is put may log."""
        self._thread = threading.Thread(target=self._run, name="nvium-log", daemon=True)

    def open(self, stream: TextIO | None) -> None:
        """Start writing to a stream. If the stream is None, because the process has no stderr, drop all lines."""
        self._write_out = writer_to(stream)
        if not self._thread.is_alive():
            self._thread.start()

    def write(self, line: str) -> None:
        if self._lines.qsize() < MAX_LINES:
            self._lines.put(line.encode(errors="backslashreplace"))
        else:
            self.num_dropped += 1

    def drain(self, seconds: float = EXIT_SECONDS) -> None:
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


def writer_to(stream: TextIO | None) -> Write:
    """Return a function that writes to a copy of the stream's file descriptor, which stays ours if the stream closes.

    Bypass the stream's buffer, which would keep the lines that do not fit on a full disk.
    """
    if stream is None:
        return discard
    try:
        descriptor = os.dup(stream.fileno())
    except (io.UnsupportedOperation, ValueError):
        return lambda line: stream.write(line.decode())
    return lambda line: write_all(descriptor, line)


def write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def discard(_: bytes) -> None:
    raise OSError


sink = LogSink()
"""The sink of this process."""

atexit.register(sink.drain)
