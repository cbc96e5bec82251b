import argparse

import pytest

from loadtest import overhead
from tests.loadtest.fake_server import STORY, FakeServer, serving


async def test_a_server_is_asked_for_streams_that_start_together_and_do_not_end_early():
    server = FakeServer(events=STORY, gap=0.01)
    async with serving(server) as base_url:
        rate = await overhead.server_rate(base_url, num_streams=3, num_tokens=9, seed=5)
    assert rate > 0
    assert server.most_running == 3
    assert [(body["max_tokens"], body["ignore_eos"]) for body in server.bodies] == [(9, True)] * 3
    assert sorted(body["seed"] for body in server.bodies) == [5, 6, 7]


async def test_a_server_that_fails_is_not_measured():
    async with serving(FakeServer(events=[], status="503 Service Unavailable")) as base_url:
        with pytest.raises(SystemExit, match="503"):
            await overhead.server_rate(base_url, num_streams=1, num_tokens=9, seed=5)


def test_the_share_is_the_median_of_the_turns(monkeypatch: pytest.MonkeyPatch):
    served, alone = iter([90.0, 50.0, 120.0]), iter([100.0, 100.0, 100.0])

    async def server_rate(*_: object) -> float:
        return next(served)

    monkeypatch.setattr(overhead, "server_rate", server_rate)
    monkeypatch.setattr(overhead, "engine_rates", lambda *_: {4: next(alone)})
    arguments = argparse.Namespace(base_url="", streams=[4], tokens=1, turns=3, threads=1)
    [row] = overhead.rows(arguments)
    assert row["shares"] == [0.9, 0.5, 1.2]
    assert row["share"] == 0.9
