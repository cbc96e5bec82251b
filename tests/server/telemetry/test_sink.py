"""Logging neither blocks nor fails, wherever the lines go."""

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.telemetry.sink import MAX_LINES, LogSink
from tests.server.live_server import LiveServer


@pytest.fixture
def sink() -> Iterator[LogSink]:
    made = LogSink()
    yield made
    made.drain()


def test_lines_are_written_in_order(sink: LogSink, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        sink.open(stream)
        for number in range(1000):
            sink.write(f"{number}\n")
        sink.drain(30)
        assert (tmp_path / "log").read_text().split() == [str(number) for number in range(1000)]
    assert sink.num_dropped == 0


def test_lines_that_a_full_disk_refuses_are_counted(sink: LogSink) -> None:
    with Path("/dev/full").open("w") as stream:
        sink.open(stream)
        for _ in range(10):
            sink.write("line\n")
        sink.drain(30)
    assert sink.num_dropped == 10


def test_lines_to_a_closed_pipe_are_counted_and_later_lines_written(sink: LogSink, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        sink.open(stream)
        sink.write("lost\n")
        sink.drain(30)
    sink.open(None)
    sink.write("lost\n")
    sink.drain(30)
    sink.open(later := io.StringIO())
    sink.write("found \ud800\n")
    sink.drain(30)
    assert (sink.num_dropped, later.getvalue()) == (2, "found \\ud800\n")


def test_a_pipe_that_is_not_read_does_not_block(sink: LogSink) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        sink.open(stream)
        started = time.monotonic()
        for _ in range(2 * MAX_LINES):
            sink.write("x" * 999 + "\n")
        sink.drain(0.1)
        assert time.monotonic() - started < 10
        assert sink.num_dropped >= 0.9 * MAX_LINES
        os.close(reading)
        sink.drain(30)


def test_dropped_lines_are_a_metric(server: LiveServer) -> None:
    assert server.gauge("nvium_dropped_log_lines_total") >= 0
