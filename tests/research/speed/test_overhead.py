import asyncio
import json
import os
import sys

import pytest

from research.speed import overhead
from research.speed.overhead import Measured, row
from tests.loadtest.fake_server import STORY, FakeServer, serving


@pytest.mark.skipif(sys.platform != "linux", reason="processor times are Linux's")
async def test_overhead_compares_servers_with_concurrent_streams(tmp_path):
    file, one, other = tmp_path / "found.json", FakeServer(events=STORY, gap=0.01), FakeServer(events=STORY)
    async with serving(one) as first, serving(other) as second:
        servers = [f"one,{first},{os.getpid()}", f"other,{second},{os.getpid()}"]
        options = ["--streams", "1", "2", "--turns", "2", "--tokens", "3", "--json", str(file)]
        await asyncio.to_thread(overhead.main, [*servers, *options])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["streams"], row["server"]) for row in rows] == [(1, "one"), (1, "other"), (2, "one"), (2, "other")]
    assert {row["share"] for row in rows if row["server"] == "one"} == {1}
    assert all(row["event_loop_us_per_token"] >= 0 for row in rows)
    assert one.most_running == 2
    assert len(one.bodies) == len(other.bodies) == 3 * (1 + 2)


def test_the_share_is_the_median_of_the_turns():
    rates = [(100.0, 90.0), (100.0, 50.0), (100.0, 120.0)]
    turns = [{(4, "engine"): Measured(engine), (4, "server"): Measured(server)} for engine, server in rates]
    found = row(turns, 4, "server", "engine")
    assert found["shares"] == [0.9, 0.5, 1.2]
    assert (found["share"], found["tokens_per_second"]) == (0.9, 90)
