"""Log lines at a terminal are sentences; elsewhere they are JSON."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog import DropEvent

from server.telemetry.human import SENTENCES, in_words, sentence
from tests.server.server_process import free_port

SECONDS = 180


def test_an_event_that_is_known_is_a_sentence() -> None:
    assert sentence({"event": "loading", "model": "tales"}) == "Loading tales …"
    assert "Playground" in sentence({"event": "ready", "url": "http://x", "playground": True})
    assert "Playground" not in sentence({"event": "ready", "url": "http://x", "playground": False})


def test_any_other_event_has_its_fields_and_a_warning_says_so() -> None:
    event = {"event": "lost a replica", "level": "warning", "timestamp": "now", "kind": "OSError", "user": None}
    assert in_words(None, "warning", event) == "warning: lost a replica kind=OSError"
    assert sentence({"event": "failed", "exception": "Traceback …"}) == "failed\nTraceback …"


def test_a_field_that_is_missing_costs_the_sentence_and_not_the_line() -> None:
    assert sentence({"event": "loading"}) == "loading"
    refused = {"event": "request", "endpoint": "completions", "status": None, "total_seconds": None}
    assert sentence(refused) == "request endpoint=completions"


def test_what_only_machines_want_is_left_out() -> None:
    silent = next(event for event, text in SENTENCES.items() if not text)
    with pytest.raises(DropEvent):
        in_words(None, "info", {"event": silent, "level": "info"})


def test_a_server_at_a_terminal_says_what_it_loads_and_where_to_look(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    port = free_port()
    code = "from server.app import run; from server.settings import Settings; run(Settings())"
    environment = os.environ | {"NVIUM_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=end, env=environment)
    os.close(end)
    try:
        told = read_until(terminal, "Ready", process)
        process.send_signal(signal.SIGINT)
        told += read_until(terminal, "Stopped", process)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert re.search(r"Loading the bundled model …\s+Loaded \S+ in \d+\.\d s: [\d,]+ parameters, float32 on cpu", told)
    assert f"http://127.0.0.1:{port}/" in told
    assert "{" not in told


def read_until(terminal: int, word: str, process: "subprocess.Popen[bytes]") -> str:
    told, deadline = "", time.monotonic() + SECONDS
    while word not in told and time.monotonic() < deadline:
        try:
            told += os.read(terminal, 4096).decode()
        except OSError:  # its other end is closed
            break
        assert told or process.poll() is None
    return told
