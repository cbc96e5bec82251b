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

from nvium_core import LoadedModel
from tests.server.generating import PATHS, asking
from tests.server.live_server import LiveServer, wait_until
from tests.server.raw_client import Answer, asked, connected
from tests.server.replicas.ray_cluster import replica_processes, replicated
from tests.server.server_process import server_process

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
async def test_a_replica_killed_under_load_breaks_only_the_streams_that_it_had_begun(server: LiveServer) -> None:
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
    repeated = await asked(server.url, asking(PATHS[0], max_tokens=LONG, seed=0))
    assert repeated.spoken() == answers[0].spoken()
    wait_until(lambda: len(replicas(server)) == 2, seconds=90)
    assert len(replicas(server) - names) == 1
    assert len(set(replica_processes()) - set(processes)) == 1


def test_prompts_with_a_common_prefix_go_to_one_replica(server: LiveServer) -> None:
    def cached_tokens(replica: str) -> float:
        page = server.http.get("/metrics").text
        [value] = re.findall(rf'nvium_cached_prompt_tokens_total{{replica="{replica}"}} (\S+)', page)
        return float(value)

    wait_until(lambda: len(replicas(server)) == 2, seconds=90)
    names = sorted(replicas(server))
    before = [cached_tokens(name) for name in names]
    story = "There was once a story that everybody knew by heart, and so nobody ever told it any more. " * 4
    for number in range(8):
        assert server.complete(prompt=f"{story}{number}", max_tokens=8).status_code == 200
    gained = [cached_tokens(name) - then for name, then in zip(names, before, strict=True)]
    assert min(gained) == 0
    assert max(gained) > 4 * len(story)


async def ask_until(server: LiveServer, num_replicas: int, num_clients: int) -> list[bytes]:
    """Keep `num_clients` streams running until there are `num_replicas`. Return all streams."""
    reached = asyncio.Event()

    async def client(seed: int) -> list[bytes]:
        streams: list[bytes] = []
        while not reached.is_set():
            streams.append((await asked(server.url, asking(max_tokens=LONG, stream=True, seed=seed))).body)
        return streams

    async with asyncio.timeout(100):
        clients = [asyncio.create_task(client(seed)) for seed in range(num_clients)]
        await asyncio.to_thread(wait_until, lambda: len(replicas(server)) == num_replicas, seconds=100)
        reached.set()
        return [stream for streams in await asyncio.gather(*clients) for stream in streams]


@pytest.mark.slow
async def test_autoscaling_follows_the_load_and_cuts_no_stream(
    ray_of_two: None, byte_model: LoadedModel, model_folder: Path
) -> None:
    scaling = {"max_replicas": 2, "sequences_per_replica": 4, "upscale_seconds": 1, "downscale_seconds": 1}
    with replicated(byte_model, model_folder, replicas=1, **scaling) as server:
        assert len(replicas(server)) == 1
        streams = await ask_until(server, num_replicas=2, num_clients=8)
        streams += await ask_until(server, num_replicas=1, num_clients=2)
        assert not any(map(is_broken, streams))
        assert server.gauge("nvium_moved_requests_total") == 0


@pytest.mark.slow
async def test_sigterm_lets_requests_at_replicas_finish(model_folder: Path, tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'nvium[ray]'")
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
    outcomes = re.findall(r'"outcome": "(\w+)"', server.log())
    assert sorted(outcomes) == ["completed", "rejected"]


def test_an_error_says_how_to_install_ray() -> None:
    command = [sys.executable, "-c", WITHOUT_RAY, "serve", "--replicas", "2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'nvium[ray]'" in ended.stderr
