"""Writes log lines on a separate thread, so that logging neither blocks nor fails.

With a full disk or an unread or closed pipe, lines are dropped and counted.
"""

import atexit
import io
import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

MAX_LINES = 4_000
"""Lines that may wait to be written."""

EXIT_SECONDS = 1
"""Timeout for writing queued lines at exit."""

Write = Callable[[bytes], object]


class LogSink:
    """A stream for log lines; `num_dropped` could not be written. Its methods never raise or block."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._write_out: Write = discard
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._run, name="nvium-log", daemon=True)

    def open(self, stream: TextIO | None) -> None:
        """Write to this stream from now on; None, if the process has no stderr, drops lines."""
        self._write_out = writer_to(stream)
        if not self._thread.is_alive():
            self._thread.start()

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line.encode(errors="backslashreplace"))
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Required of a stream."""

    def drain(self, seconds: float = EXIT_SECONDS) -> None:
        """Wait until everything is written, for at most `seconds`."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, seconds)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write_out(line)
            except Exception:
                self.num_dropped += 1
            self._lines.task_done()


def writer_to(stream: TextIO | None) -> Write:
    """Writes to a stream's file descriptor: the stream's own buffer would keep lines that a full disk refuses."""
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
"""This process's sink."""


atexit.register(sink.drain)
