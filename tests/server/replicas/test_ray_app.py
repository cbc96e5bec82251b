"""Ray's replicas: death, shutdown and the start."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from server.replicas.reaper import processes_of, reaper_of
from tests.server.live_server import LiveServer, wait_until
from tests.server.raw_client import PATHS, Answer, asked, asking, connected
from tests.server.replicas.ray_cluster import replica_processes
from tests.server.server_process import server_process

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'nvium[ray]'")

LONG = 1500
NUM_STREAMS, NUM_WHOLE = 12, 24
SERVES = "from nvium_core.commands.serving import serve; serve()"
WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from nvium_core.cli import main; main()"


def replicas(server: LiveServer) -> set[str]:
    """Return the names of the replicas on the metrics page."""
    return set(re.findall(r'nvium_requests_running{replica="(\w+)"}', server.http.get("/metrics").text))


async def streamed(server: LiveServer, seed: int, begun: asyncio.Barrier) -> bytes:
    """Stream an answer. Wait after its first chunk until all streams have begun."""
    async with connected(server.url) as connection:
        await connection.send(asking(max_tokens=LONG, stream=True, seed=seed))
        await connection.head()
        first = await connection.chunk()
        await begun.wait()
        return first + await connection.rest()


async def answered(server: LiveServer, seed: int, begun: asyncio.Barrier) -> Answer:
    """Request a whole answer. Wait for it once all streams have begun."""
    async with connected(server.url) as connection:
        await connection.send(asking(PATHS[seed % 2], max_tokens=LONG, seed=seed))
        await begun.wait()
        return await connection.answer()


def is_broken(stream: bytes) -> bool:
    """Return whether a stream ended with an error event. Check that all its events are complete."""
    *events, done, end = stream.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    *chunks, last = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert not any("error" in chunk for chunk in chunks)
    if "error" in last:
        assert last["error"]["code"] == "replica_lost"
        return True
    assert last["choices"][0]["finish_reason"] == "length"
    return False


@pytest.mark.slow
async def test_a_replica_killed_under_load_breaks_only_the_streams_that_it_had_begun(server):
    wait_until(lambda: len(replicas(server)) == 2, seconds=60)
    processes, names = replica_processes(), replicas(server)
    lost = server.gauge("nvium_broken_streams_total"), server.gauge("nvium_moved_requests_total")
    begun = asyncio.Barrier(NUM_STREAMS + NUM_WHOLE + 1)
    streams = [asyncio.create_task(streamed(server, seed, begun)) for seed in range(NUM_STREAMS)]
    wholes = [asyncio.create_task(answered(server, seed, begun)) for seed in range(NUM_WHOLE)]
    async with asyncio.timeout(150):
        await begun.wait()
        os.kill(processes[0], signal.SIGKILL)
        broken = [is_broken(stream) for stream in await asyncio.gather(*streams)]
        answers = await asyncio.gather(*wholes)
    assert 0 < sum(broken) < NUM_STREAMS
    assert {answer.status for answer in answers} == {200}
    assert all(answer.finish_reasons() == ["length"] for answer in answers)
    num_broken, num_moved = server.gauge("nvium_broken_streams_total"), server.gauge("nvium_moved_requests_total")
    assert num_broken - lost[0] == sum(broken)
    assert num_moved - lost[1] >= NUM_WHOLE // 4
    assert (await asked(server.url, asking(PATHS[0], max_tokens=LONG, seed=0))).spoken() == answers[0].spoken()
    wait_until(lambda: len(replicas(server)) == 2, seconds=90)
    assert len(replicas(server) - names) == 1
    assert len(set(replica_processes()) - set(processes)) == 1


@needs_ray
@pytest.mark.slow
async def test_sigterm_lets_requests_at_replicas_finish(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, code=SERVES, replicas=1) as server:
        async with connected(server.url) as connection:
            await connection.send(asking(max_tokens=LONG, stream=True))
            await connection.head()
            server.terminate()
            wait_until(lambda: not server.is_ready)
            refused = await asked(server.url, asking())
            assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
            assert not is_broken(await connection.rest())
            assert server.exit_code(seconds=30) == 0
    outcomes = re.findall(r'"endpoint": "completions".*"outcome": "(\w+)"', server.log())  # not those of probes
    assert sorted(outcomes) == ["completed", "rejected"]


def test_an_error_says_how_to_install_ray():
    command = [sys.executable, "-c", WITHOUT_RAY, "serve", "--replicas", "2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'nvium[ray]'" in ended.stderr


GATEWAY = """
import sys, time
from server.replicas.reaper import reaper_of
with reaper_of(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def ray_process(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process with the session's folder on its command line."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])


def test_the_reaper_kills_the_ray_processes_of_a_killed_gateway(tmp_path, ray_process):
    with subprocess.Popen([sys.executable, "-c", GATEWAY, str(tmp_path)], stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout
        assert gateway.stdout.readline() == b"ready\n"
        gateway.kill()
    assert ray_process.wait(timeout=30) < 0
    wait_until(lambda: not list(processes_of(str(tmp_path))))


def test_the_reaper_kills_nothing_after_an_orderly_stop(tmp_path, ray_process):
    with reaper_of(str(tmp_path)):
        assert ray_process.pid in processes_of(str(tmp_path))
    assert ray_process.poll() is None
    assert os.getpid() not in processes_of(str(tmp_path))
    ray_process.kill()
    ray_process.wait()


@needs_ray
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_more_replicas_than_gpus_are_refused_in_one_line():
    command = [sys.executable, "-m", "nvium_core.cli", "serve", "--replicas", "2", "--device", "cuda"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "replicas: 2 replicas need 2 GPUs, this machine has 0" in ended.stderr
