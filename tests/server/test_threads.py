"""Threads that do jobs for the event loop."""

import asyncio
import threading
from functools import partial

import pytest

from server.threads import Threads


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
