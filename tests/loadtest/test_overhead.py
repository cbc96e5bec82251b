import argparse
import os
import sys
import time
from collections.abc import Iterator

import pytest

from loadtest import overhead
from loadtest.overhead import Served
from tests.loadtest.fake_server import STORY, FakeServer, serving


async def test_a_server_is_asked_for_streams_that_start_together_and_do_not_end_early():
    server = FakeServer(events=STORY, gap=0.01)
    async with serving(server) as base_url:
        told = await overhead.served(base_url, num_streams=3, num_tokens=9, seed=5)
    assert told.rate > 0
    assert told.loop_us is None
    assert server.most_running == 3
    assert [(body["max_tokens"], body["ignore_eos"]) for body in server.bodies] == [(9, True)] * 3
    assert sorted(body["seed"] for body in server.bodies) == [5, 6, 7]


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (FakeServer(events=[], status="503 Service Unavailable"), "503"),
        (FakeServer(events=STORY[:-1]), "without"),
        (FakeServer(events=[*STORY[:-2], STORY[-1]]), "without"),
    ],
    ids=["refused", "cut", "uncounted"],
)
async def test_a_server_that_fails_is_not_measured(server: FakeServer, told: str):
    async with serving(server) as base_url:
        with pytest.raises(SystemExit, match=told):
            await overhead.served(base_url, num_streams=3, num_tokens=9, seed=5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a thread's processor time")
async def test_what_a_token_costs_the_first_thread_of_a_process_can_be_seen():
    """The clock that is read may lag behind the thread's own by a tick of the kernel's, 10 ms at most."""
    async with serving(FakeServer(events=busy(0.1))) as base_url:
        told = await overhead.served(base_url, num_streams=1, num_tokens=3, seed=5, pid=os.getpid())
    assert told.loop_us is not None
    assert told.loop_us > 80_000 / 3


def busy(seconds: float) -> Iterator[str]:
    """A story that takes its thread that much processor time."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
    yield from STORY


def test_the_share_is_the_median_of_the_turns(monkeypatch: pytest.MonkeyPatch):
    over_http, alone = iter([90.0, 50.0, 120.0]), iter([100.0, 100.0, 100.0])

    async def served(*_: object) -> Served:
        return Served(next(over_http), loop_us=30.0)

    monkeypatch.setattr(overhead, "served", served)
    monkeypatch.setattr(overhead, "engine_rates", lambda *_: {4: next(alone)})
    arguments = argparse.Namespace(base_url="", streams=[4], tokens=1, turns=3, threads=1, pid=7)
    [row] = overhead.rows(arguments)
    assert row["shares"] == [0.9, 0.5, 1.2]
    assert (row["share"], row["loop_us_per_token"]) == (0.9, 30.0)
