"""Log lines at a terminal are sentences, elsewhere they are JSON."""

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


def test_a_known_event_becomes_a_sentence() -> None:
    assert sentence({"event": "loading", "model": "tales"}) == "Loading tales …"
    assert "Playground" in sentence({"event": "ready", "url": "http://x", "playground": True})
    assert "Playground" not in sentence({"event": "ready", "url": "http://x", "playground": False})


def test_other_events_show_their_level_and_fields() -> None:
    event = {"event": "lost a replica", "level": "warning", "timestamp": "now", "kind": "OSError", "user": None}
    assert in_words(None, "warning", event) == "warning: lost a replica kind=OSError"
    assert sentence({"event": "failed", "exception": "Traceback …"}) == "failed\nTraceback …"


def test_a_known_event_without_a_field_shows_its_fields() -> None:
    assert sentence({"event": "loading"}) == "loading"
    refused = {"event": "request", "endpoint": "completions", "status": None, "total_seconds": None}
    assert sentence(refused) == "request endpoint=completions"


def test_events_with_an_empty_sentence_are_hidden() -> None:
    silent = next(event for event, text in SENTENCES.items() if not text)
    with pytest.raises(DropEvent):
        in_words(None, "info", {"event": silent, "level": "info"})


def test_a_server_at_a_terminal_shows_the_model_and_its_url(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    port = free_port()
    code = "from server.app import run; from server.settings import Settings; run(Settings())"
    environment = os.environ | {"NVIUM_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=end, env=environment)
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
    assert re.search(r"Loading the bundled model …\s+Loaded \S+ in \d+\.\d s: [\d,]+ parameters, float32 on cpu", shown)
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
