"""Threads are there before the first request: one that is started when memory is short may hang whoever starts it."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from nvium_core import LoadedModel
from server.threads import Threads
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


async def test_jobs_are_done_and_their_errors_raised() -> None:
    threads, lost = Threads(2, "test"), list[int]()
    assert await asyncio.gather(*(threads.do(partial(pow, 2, n), partial(lost.append, n)) for n in range(20))) == [
        2**n for n in range(20)
    ]
    with pytest.raises(ZeroDivisionError):
        await threads.do(lambda: 1 // 0, partial(lost.append, 0))
    assert lost == []


async def test_a_job_whose_result_cannot_be_handed_over_is_reported_and_the_next_one_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, lost, loop = Threads(1, "test"), list[str](), asyncio.get_running_loop()
    handed_over = loop.call_soon_threadsafe

    def fail(*_: object) -> None:
        monkeypatch.setattr(loop, "call_soon_threadsafe", handed_over)
        raise MemoryError

    monkeypatch.setattr(loop, "call_soon_threadsafe", fail)
    waiting = asyncio.create_task(threads.do(int, partial(lost.append, "first")))
    await asyncio.sleep(0)
    assert await threads.do(lambda: "second", partial(lost.append, "second")) == "second"
    assert lost == ["first"]
    waiting.cancel()


def test_threads_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    threads = Threads(3, "test")
    own = set(threading.enumerate()) - before
    assert len(own) == 3
    del threads
    for thread in own:
        thread.join(timeout=10)
        assert not thread.is_alive()
