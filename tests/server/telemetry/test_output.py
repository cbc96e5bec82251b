"""Logging neither blocks nor fails, wherever the lines go. At a terminal they are sentences."""

import io
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from server.telemetry.logs import MAX_LINES, LogSink, in_words, sentence
from tests.server.log_lines import log_lines
from tests.server.server_process import CODE, free_port


@pytest.fixture
def sink() -> Iterator[LogSink]:
    made = LogSink()
    yield made
    made.drain()


def test_lines_are_written_in_order(sink, tmp_path):
    with (tmp_path / "log").open("w") as stream:
        sink.open(stream)
        for number in range(1000):
            sink.write(f"{number}\n")
        sink.drain(30)
        assert (tmp_path / "log").read_text().split() == [str(number) for number in range(1000)]
    assert sink.num_dropped == 0


def test_lines_that_a_full_disk_refuses_are_counted(sink):
    with Path("/dev/full").open("w") as stream:
        sink.open(stream)
        for _ in range(10):
            sink.write("line\n")
        sink.drain(30)
    assert sink.num_dropped == 10


def test_lines_to_a_closed_pipe_are_counted_and_later_lines_written(sink, tmp_path):
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


def test_a_pipe_that_is_not_read_does_not_block(sink):
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("logger", [structlog.get_logger("nvium.server"), logging.getLogger("asyncio")])
def test_a_line_logged_while_another_is_put_does_not_block(logger):
    """As by an exception in a garbage collection. Here a signal's handler logs, at moments as arbitrary."""
    before = signal.signal(signal.SIGVTALRM, lambda *_: logger.error("inner"))
    with log_lines() as log:
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-4)
        try:
            for _ in range(20_000):
                logger.error("outer")
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        assert log.text.count("inner") > 10
        assert all("inner" in line or "outer" in line for line in log.text.splitlines())


SECONDS = 180


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        ({"event": "warm", "seconds": 1.24}, "Warmed up in 1.2 s."),
        ({"event": "warm"}, "warm"),
        ({"event": "request", "endpoint": "completions", "status": None}, "request endpoint=completions"),
        ({"event": "failed", "exception": "Traceback …"}, "failed\nTraceback …"),
        ({"event": "lost", "level": "warning", "timestamp": "now", "kind": 1, "user": None}, "warning: lost kind=1"),
    ],
)
def test_an_event_is_a_sentence_if_its_fields_are_known_else_its_level_and_fields(event, shown):
    assert in_words(None, "info", event) == shown


def test_the_playground_is_shown_if_it_is_on():
    for is_on in (True, False):
        assert ("Playground" in sentence({"event": "ready", "url": "http://x", "playground": is_on})) == is_on


def test_a_server_at_a_terminal_shows_the_model_and_its_url(tmp_path):
    terminal, end = pty.openpty()
    port = free_port()
    environment = os.environ | {"NVIUM_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", CODE], stderr=end, env=environment)
    os.close(end)
    try:
        shown = read_until(terminal, "Ready", process)
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, "Stopped", process)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    loaded = r"Loaded \S+ in \d+\.\d s: [\d,]+ parameters, weights in \S+, float32 on cpu"
    assert re.match(rf"Starting; .+ …\s+Loading the bundled model …\s+{loaded}", shown)
    assert f"http://127.0.0.1:{port}/" in shown
    assert "{" not in shown


def read_until(terminal: int, word: str, process: "subprocess.Popen[bytes]") -> str:
    shown, deadline = "", time.monotonic() + SECONDS
    while word not in shown and time.monotonic() < deadline:
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # the process has closed its end
            break
        assert shown or process.poll() is None
    return shown
