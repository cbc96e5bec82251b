"""Where log lines go: written by a thread of their own, so that whoever logs neither waits nor fails.

A full disk, a pipe that nobody reads and one whose reader has gone cost lines, which are counted, and nothing else.
"""

import atexit
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_BYTES = 4_000_000
"""Of lines that wait to be written."""

EXIT_SECONDS = 1
"""How long the end of the process waits for them."""

Write = Callable[[bytes], object]


class LogSink:
    """A stream for lines, of which `num_dropped` could not be written. Nothing here raises or waits for the outside."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._write_out: Write = refuse
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def open(self, stream: TextIO | None) -> None:
        """Write to this stream from now on, or nowhere: it is None where the process was started without."""
        self._write_out = writer_to(stream)

    def write(self, line: str) -> None:
        encoded = line.encode(errors="backslashreplace")
        with self._changed:
            if self._num_bytes + len(encoded) > MAX_BYTES:
                self.num_dropped += 1
                return
            self._lines.append(encoded)
            self._num_bytes += len(encoded)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nvium-log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Part of being a stream."""

    def drain(self, seconds: float = EXIT_SECONDS) -> None:
        """Wait until everything is written, but no longer than so many seconds."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._num_bytes and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                line = self._lines.popleft()
            is_written = self._try(line)
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
    """What writes to a stream past its own buffer, which would keep what a full disk has not taken."""
    if stream is None:
        return refuse
    try:
        descriptor = stream.fileno()
    except (io.UnsupportedOperation, ValueError):
        return lambda line: stream.write(line.decode())
    return lambda line: write_all(descriptor, line)


def write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def refuse(_: bytes) -> None:
    raise OSError


sink = LogSink()
"""Of this process."""

atexit.register(sink.drain)
