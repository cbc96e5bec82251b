"""Threads are there before the first request: one that is started when memory is short may hang whoever starts it."""

import threading
from typing import Any

import pytest

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.live_server import live_server

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


def test_no_thread_starts_while_requests_are_served(byte_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[str](), threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    with live_server(byte_model) as server:
        monkeypatch.setattr(threading.Thread, "start", noted)
        for path, bodies in ASKED.items():
            for body in bodies:
                assert server.http.post(path, json={"model": NAME, **body}).status_code == 200
        for path in LOOKED_AT:
            assert server.http.get(path).status_code == 200
    assert started == []
