"""Threads are there before the first request: one that is started when memory is short may hang whoever starts it."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nvium_core import Engine
from server.generation import service
from server.settings import Settings
from tests.byte_model import NAME
from tests.faults.cluster import cluster
from tests.faults.divisions import engine_of
from tests.faults.kinds import Start
from tests.server.forked_server import forked_server
from tests.server.server_process import ServerProcess

ASKED: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Once " * 600, "max_tokens": 2},
        {"prompt": "Once", "max_tokens": 400, "n": 8, "ignore_eos": True},
        {"prompt": "Once", "max_tokens": 20, "structured_outputs": {"regex": "(yes|no){2,9}"}},
        *({"prompt": "Once", "n": number, "max_tokens": 20, "ignore_eos": True} for number in range(1, 9)),
    ],
    "/v1/chat/completions": [{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "stream": True}],
    "/v1/responses": [{"input": "Hello", "max_output_tokens": 5}],
    "/tokenize": [{"prompt": "Hello"}],
    "/detokenize": [{"tokens": [65]}],
}
LOOKED_AT = ("/", "/metrics", "/livez", "/readyz", "/v1/models", "/openapi.json")

STARTS = "a thread starts: "


def note_threads() -> None:
    """In the log, of this process and of an engine's own."""
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        os.write(2, f"{STARTS}{thread.name}\n".encode())
        start(thread)

    threading.Thread.start = noted  # type: ignore[method-assign]
    service.built = built_with_noted_threads


def built_with_noted_threads(settings: Settings) -> Engine:
    """In the engine's process, where the module is as it was."""
    engine = service.built(settings)
    note_threads()
    return engine


def threads_of(server: ServerProcess, options: Mapping[str, object]) -> list[str]:
    """Those of native code too."""
    pids = [server.process.pid, *([engine_of(server)] if "engine_process" in options else [])]
    return sorted(thread.name for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir())


def ask(server: ServerProcess, path: str, body: Mapping[str, object]) -> None:
    assert server.http.post(path, json={"model": NAME, **body}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "options"),
    [
        (forked_server, {}),
        (forked_server, {"log_level": "error"}),
        (forked_server, {"engine_process": 1}),
        (cluster, {}),
    ],
    ids=["alone", "log of errors", "engine's process", "gateway"],
)
def test_no_thread_starts_while_requests_are_served(
    start: Start, options: Mapping[str, object], model_folder: Path, tmp_path: Path
) -> None:
    with start(model_folder, tmp_path / "log", prepare=note_threads, **options) as server:
        ask(server, "/v1/completions", {"prompt": "Once", "max_tokens": 1})  # the device thread is at work
        before, told = threads_of(server, options), server.log().count(STARTS)
        assert told
        for path, bodies in ASKED.items():
            for body in bodies:
                ask(server, path, body)
        for path in LOOKED_AT:
            assert server.http.get(path).status_code == 200
        assert server.log().split(STARTS)[told + 1 :] == []
        assert threads_of(server, options) == before
