"""Log lines are written by a thread of their own, so that logging neither waits nor fails.

A full disk, an unread pipe or a closed one only loses lines, which are counted.
"""

import atexit
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

MAX_BYTES = 4_000_000
"""Of lines waiting to be written."""

EXIT_SECONDS = 1
"""How long the process waits for them at its end."""

Write = Callable[[bytes], object]


class LogSink:
    """A stream for log lines; `num_dropped` could not be written. Its methods never raise or block."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._write_out: Write = discard
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def open(self, stream: TextIO | None) -> None:
        """Write to this stream from now on; None, if the process has no stderr, drops lines."""
        self._write_out = writer_to(stream)
        if self._thread is None:  # not with the first line: there may be no memory for a thread then
            self._thread = threading.Thread(target=self._run, name="nvium-log", daemon=True)
            self._thread.start()

    def write(self, line: str) -> None:
        try:
            self._take(line.encode(errors="backslashreplace"))
        except MemoryError:
            self.num_dropped += 1

    def _take(self, encoded: bytes) -> None:
        with self._changed:
            if self._num_bytes + len(encoded) > MAX_BYTES:
                self.num_dropped += 1
                return
            self._lines.append(encoded)
            self._num_bytes += len(encoded)
            self._changed.notify_all()

    def flush(self) -> None:
        """Required of a stream."""

    def drain(self, seconds: float = EXIT_SECONDS) -> None:
        """Wait until everything is written, for at most `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._num_bytes and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _run(self) -> None:
        while True:
            with suppress(MemoryError):  # that waiting takes
                self._write_next()

    def _write_next(self) -> None:
        with self._changed:
            while not self._lines:
                self._changed.wait()
            line = self._lines.popleft()
        is_written = False
        try:
            is_written = self._try(line)
        finally:
            with self._changed:
                self.num_dropped += not is_written
                self._num_bytes -= len(line)
                self._changed.notify_all()

    def _try(self, line: bytes) -> bool:
        try:
            self._write_out(line)
        except Exception:
            return False
        return True


def writer_to(stream: TextIO | None) -> Write:
    """Writes to a stream past its own buffer, which would keep lines that a full disk refuses."""
    if stream is None:
        return discard
    try:
        descriptor = stream.fileno()
    except (io.UnsupportedOperation, ValueError):
        return lambda line: stream.write(line.decode())
    return lambda line: write_all(descriptor, line)


def write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def discard(_: bytes) -> None:
    raise OSError


sink = LogSink()
"""Of this process."""


def num_dropped_lines() -> int:
    """By this process so far."""
    return sink.num_dropped


atexit.register(sink.drain)
