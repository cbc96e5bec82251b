import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import overhead
from loadtest.overhead import Measured, Server, family, main, processor_seconds
from tests.loadtest.fake_server import STORY, FakeServer, serving

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes' children and times")

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


async def test_a_server_is_asked_for_streams_that_start_together_and_do_not_end_early():
    server = FakeServer(events=STORY, gap=0.01)
    async with serving(server) as base_url:
        found = await overhead.served(Server("a", base_url), num_streams=3, num_tokens=9, seed=5)
    assert found.rate > 0
    assert found.us_per_token == {}
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
            await overhead.served(Server("a", base_url), num_streams=3, num_tokens=9, seed=5)


@linux_only
async def test_what_a_token_costs_a_process_and_its_first_thread_can_be_seen():
    """The clocks may lag behind the thread's own by a tick of the kernel's, 10 ms at most."""
    async with serving(FakeServer(events=busy(0.1))) as base_url:
        found = await overhead.served(Server("a", base_url, os.getpid()), num_streams=1, num_tokens=3, seed=5)
    assert min(found.us_per_token.values()) > 80_000 / 3
    assert found.us_per_token.keys() == overhead.CLOCKS.keys()


def busy(seconds: float) -> Iterator[str]:
    """A story that takes its thread that much processor time."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
    yield from STORY


@linux_only
def test_a_family_is_a_process_and_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while len(members := list(family(process.pid))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.communicate(b"\n")
    assert members[0] == process.pid
    assert len(members) == 2


@linux_only
def test_processor_time_is_what_a_process_has_had() -> None:
    before, started = processor_seconds([os.getpid()]), time.process_time()
    while time.process_time() - started < 0.2:
        pass
    assert processor_seconds([os.getpid()]) - before >= 0.15


def test_the_share_is_the_median_of_the_turns_and_the_first_warms_up(monkeypatch: pytest.MonkeyPatch):
    over_http, alone = iter([1.0, 90.0, 50.0, 120.0]), iter([1000.0, 100.0, 100.0, 100.0])

    async def served(*_: object) -> Measured:
        return Measured(next(over_http), {"event_loop": 30.0})

    monkeypatch.setattr(overhead, "served", served)
    monkeypatch.setattr(overhead, "engine_rates", lambda *_: {4: next(alone)})
    arguments = argparse.Namespace(servers=[], base_url="", streams=[4], tokens=1, turns=3, threads=1, pid=7)
    engine, server = overhead.rows(arguments)
    assert (engine["server"], engine["share"], engine["tokens_per_second"]) == ("engine", 1, 100)
    assert server["shares"] == [0.9, 0.5, 1.2]
    assert (server["share"], server["event_loop_us_per_token"]) == (0.9, 30.0)


@linux_only
async def test_servers_take_turns(tmp_path: Path) -> None:
    file, one, other = tmp_path / "found.json", FakeServer(events=STORY), FakeServer(events=STORY)
    async with serving(one) as first, serving(other) as second:
        servers = [f"one,{first},{os.getpid()}", f"other,{second},{os.getpid()}"]
        options = ["--streams", "1", "2", "--turns", "2", "--tokens", "3", "--json", str(file)]
        await asyncio.to_thread(main, [*servers, *options])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["streams"], row["server"]) for row in rows] == [(1, "one"), (1, "other"), (2, "one"), (2, "other")]
    assert {row["share"] for row in rows if row["server"] == "one"} == {1}
    assert len(one.bodies) == len(other.bodies) == 3 * (1 + 2)
