import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.beside import Taken, family, main, processor_seconds, row
from tests.loadtest.fake_server import STORY, FakeServer, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's children")

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def test_a_family_is_a_process_and_all_below_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while len(members := list(family(process.pid))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.communicate(b"\n")
    assert members[0] == process.pid
    assert len(members) == 2


def test_processor_time_is_what_a_process_has_had() -> None:
    before, started = processor_seconds([os.getpid()]), time.process_time()
    while time.process_time() - started < 0.2:
        pass
    assert processor_seconds([os.getpid()]) - before >= 0.15


def test_a_share_is_the_median_of_those_of_the_turns() -> None:
    told = row(
        8, "other", [Taken(50, 3, 1), Taken(10, 1, 1), Taken(90, 2, 0)], [Taken(100, 1, 1), *[Taken(10, 1, 1)] * 2]
    )
    assert (told["tokens_per_second"], told["share"]) == (50, 1)
    assert (told["processor_us_per_token"], told["first_process_us_per_token"]) == (2, 1)


async def test_servers_take_turns(tmp_path: Path) -> None:
    file, one, other = tmp_path / "found.json", FakeServer(events=STORY), FakeServer(events=STORY)
    async with serving(one) as first, serving(other) as second:
        servers = [f"one,{first},{os.getpid()}", f"other,{second},{os.getpid()}"]
        options = ["--streams", "1", "2", "--turns", "2", "--tokens", "3", "--json", str(file)]
        await asyncio.to_thread(main, [*servers, *options])
    rows = json.loads(file.read_text())["rows"]
    assert [(told["streams"], told["server"]) for told in rows] == [(1, "one"), (1, "other"), (2, "one"), (2, "other")]
    assert {told["share"] for told in rows if told["server"] == "one"} == {1}
    assert len(one.bodies) == len(other.bodies) == 3 * (1 + 2)
