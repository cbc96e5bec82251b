"""Replicas as processes: start, death, replacement and shutdown."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import torch

from server.replicas import fleet as module
from server.replicas.fleet import Fleet, own_options
from server.settings import Settings, environment
from server.telemetry.metrics import Metrics
from tests.faults.cluster import replicas_of
from tests.server.live_server import LiveServer, wait_until
from tests.server.raw_client import PATHS, Answer, asked, asking, connected
from tests.server.server_process import server_process
from tests.text.test_sandbox import is_running

LONG = 1500
NUM_STREAMS, NUM_WHOLE = 12, 24
STORED = ("responses", "completed"), ("responses", "invalid"), ("other", "invalid")
BY_SIGNAL = "replicas: a replica was ended by signal"
OUT_OF_MEMORY = "which the system also sends when memory runs out"
HANGS = """
import threading
from nvium_core.engine.worker import EngineWorker
EngineWorker._step = lambda _: threading.Event().wait()
"""


def num_ready(server: LiveServer) -> int:
    return sum(replica.is_ready for replica in server.service.fleet.replicas)


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
    processes = replicas_of(os.getpid())
    lost = server.gauge("nvium_broken_streams_total"), server.gauge("nvium_moved_requests_total")
    begun = asyncio.Barrier(NUM_STREAMS + NUM_WHOLE + 1)
    streams = [asyncio.create_task(streamed(server, seed, begun)) for seed in range(NUM_STREAMS)]
    wholes = [asyncio.create_task(answered(server, seed, begun)) for seed in range(NUM_WHOLE)]
    async with asyncio.timeout(150):
        await begun.wait()
        os.kill(min(processes), signal.SIGKILL)
        broken = [is_broken(stream) for stream in await asyncio.gather(*streams)]
        answers = await asyncio.gather(*wholes)
    assert 0 < sum(broken) < NUM_STREAMS
    assert {answer.status for answer in answers} == {200}
    assert all(answer.finish_reasons() == ["length"] for answer in answers)
    num_broken, num_moved = server.gauge("nvium_broken_streams_total"), server.gauge("nvium_moved_requests_total")
    assert num_broken - lost[0] == sum(broken)
    assert num_moved - lost[1] >= NUM_WHOLE // 4
    assert (await asked(server.url, asking(PATHS[0], max_tokens=LONG, seed=0))).spoken() == answers[0].spoken()
    await asyncio.to_thread(wait_until, lambda: num_ready(server) == 2, 60)
    assert len(replicas_of(os.getpid()) - processes) == 1


def test_a_replica_that_hangs_is_replaced(server, monkeypatch):
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 1)
    wait_until(lambda: num_ready(server) == 2)
    processes, restarts = replicas_of(os.getpid()), server.gauge("nvium_replica_restarts_total")
    os.kill(min(processes), signal.SIGSTOP)
    wait_until(lambda: not is_running(min(processes)))
    assert set(re.findall(r'nvium_requests_running{replica="(\w+)"}', server.http.get("/metrics").text)) < {"0", "1"}
    wait_until(lambda: num_ready(server) == 2, 60)
    assert server.gauge("nvium_replica_restarts_total") == restarts + 1
    assert len(replicas_of(os.getpid()) & processes) == 1


@pytest.mark.slow
async def test_a_replica_whose_device_hangs_is_ended_within_15_seconds(monkeypatch, model_folder):
    monkeypatch.setattr(module, "PROGRAM", module.PROGRAM.replace("from {}", HANGS + "from {}"))
    fleet = Fleet(Settings(model=str(model_folder), device="cpu"), Metrics())
    [replica] = fleet.replicas
    async with fleet.running():
        await asyncio.wait_for(asyncio.wrap_future(fleet.started), 120)
        started = time.monotonic()
        with pytest.raises(aiohttp.ClientError):
            await replica.session.post("http://replica/v1/completions", json={"model": "default", "prompt": "Once"})
        assert time.monotonic() - started < 15


def test_stored_responses_are_found_in_whichever_replica(server):
    def counted(endpoint: str, outcome: str) -> float:
        return server.gauge(f'nvium_requests_total{{endpoint="{endpoint}",outcome="{outcome}"}}')

    before = [counted(*each) for each in STORED]
    asked = {"model": "default", "input": "Tell me of an owl.", "max_output_tokens": 2}
    stored = [server.http.post("/v1/responses", json=asked).json()["id"] for _ in range(8)]
    for response_id in stored:
        assert server.http.post("/v1/responses", json=asked | {"previous_response_id": response_id}).status_code == 200
        assert server.http.get(f"/v1/responses/{response_id}").json()["id"] == response_id
        assert server.http.get(f"/v1/responses/{response_id}/input_items").json()["data"]
        assert "response.incomplete" in server.http.get(f"/v1/responses/{response_id}?stream=true").text
        assert server.http.delete(f"/v1/responses/{response_id}").json()["deleted"]
        missing = server.http.get(f"/v1/responses/{response_id}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")
    wait_until(lambda: [counted(*each) - count for each, count in zip(STORED, before, strict=True)] == [16, 0, 8])


@pytest.mark.slow
async def test_sigterm_lets_requests_at_replicas_finish(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, replicas=1) as server:
        [replica] = replicas_of(server.process.pid)
        async with connected(server.url) as connection:
            await connection.send(asking(max_tokens=LONG, stream=True))
            await connection.head()
            server.terminate()
            wait_until(lambda: not server.is_ready)
            refused = await asked(server.url, asking())
            assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
            assert not is_broken(await connection.rest())
            assert server.exit_code(seconds=30) == 0
        assert not is_running(replica)
    outcomes = re.findall(r'"endpoint": "completions".*"outcome": "(\w+)"', server.log())  # not those of probes
    assert sorted(outcomes) == ["completed", "rejected"]


def test_only_the_gateway_may_connect_to_a_replica_which_ends_with_a_killed_gateway_and_leaves_no_file(
    model_folder, tmp_path
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {"TMPDIR": str(temporary)}
    with server_process(model_folder, tmp_path, variables=variables, replicas=1) as server:
        [replica] = replicas_of(server.process.pid)
        name, gateway = Path(f"/proc/{replica}/cmdline").read_text().split("\0")[4:6]
        assert int(gateway) == server.process.pid
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name}")
            assert stranger.recv(1) == b""
        server.process.kill()
        wait_until(lambda: not is_running(replica))
    assert list(temporary.rglob("*")) == []


def test_a_model_that_no_replica_can_load_is_refused_in_one_line(nvium):
    line = nvium.refuses("serve", "--port", 0, "/nowhere", "--replicas", 2)
    assert line == "nvium: /nowhere: no such folder, file or Hub name\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_more_replicas_than_gpus_are_refused_in_one_line(nvium):
    line = nvium.refuses("serve", "--port", 0, "--replicas", 2, "--device", "cuda")
    assert "replicas: 2 replicas need 2 GPUs, this machine has 0" in line


async def test_a_replica_that_keeps_ending_is_started_again_after_growing_pauses(monkeypatch):
    fleet, pauses = Fleet(Settings(device="cpu"), Metrics()), list[float]()
    [replica] = fleet.replicas
    replica.was_ready.set()

    async def ends() -> str:
        return "out of order"

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            raise asyncio.CancelledError

    monkeypatch.setattr(replica, "run", ends)
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=noted))  # other threads' event loops sleep too
    with pytest.raises(asyncio.CancelledError):
        await fleet._keep(replica)
    assert pauses == [0.5, 1.5, 3.5, 7.5, 15.5, 30, 30, 30]


@pytest.mark.parametrize(
    ("printed", "end", "is_started", "reason"),
    [
        ("ready", "sys.exit(0)", True, "replicas: a replica ended with exit code 0"),
        ("model: is damaged", "sys.exit(2)", False, "model: is damaged"),
        ("model: is damaged", "sys.exit(1)", False, "replicas: a replica ended with exit code 1"),
        ("loading", "os.abort()", False, f"{BY_SIGNAL} 6 (Aborted)"),
        ("loading", "os.kill(os.getpid(), 9)", False, f"{BY_SIGNAL} 9 (Killed), {OUT_OF_MEMORY}"),
        ("loading", "os.kill(os.getpid(), 34)", False, f"{BY_SIGNAL} 34 (Real-time signal 0)"),
    ],
)
async def test_what_a_library_prints_is_neither_the_start_nor_the_error(monkeypatch, printed, end, is_started, reason):
    program = f"import os, sys; print('a library'); print({printed!r}, flush=True); {end}"
    monkeypatch.setattr(module, "PROGRAM", program)
    [replica] = Fleet(Settings(device="cpu"), Metrics()).replicas
    replica.connect()
    assert await replica.run() == reason
    assert replica.was_ready.is_set() == is_started
    await replica.session.close()


async def test_a_bug_before_the_start_ends_the_start(monkeypatch):
    fleet = Fleet(Settings(device="cpu"), Metrics())

    async def breaks() -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(fleet.replicas[0], "run", breaks)
    async with fleet.running():
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(asyncio.wrap_future(fleet.started), 30)
    assert not fleet.has_failed


async def test_a_fleet_that_no_longer_keeps_its_replicas_has_failed(monkeypatch):
    fleet = Fleet(Settings(device="cpu"), Metrics())

    async def breaks() -> str:
        fleet.replicas[0].was_ready.set()
        await asyncio.wrap_future(fleet.started)
        raise RuntimeError

    monkeypatch.setattr(fleet.replicas[0], "run", breaks)
    async with fleet.running():
        assert not fleet.has_failed
        await asyncio.to_thread(wait_until, lambda: fleet.has_failed)


def test_replicas_share_threads_and_gpus_and_get_no_keys(monkeypatch):
    given = Settings(api_keys=("sk-1",), cors_origins=("*",), latency_buckets=(0.1, 1), max_n=3, goodbye_seconds=9)
    own = given.model_copy(update=own_options(given, 2))
    assert Settings(**json.loads(own.model_dump_json())) == own.model_copy(update={"api_keys": ()})
    assert (own.max_n, own.cors_origins, own.goodbye_seconds, own.stall_seconds) == (3, (), 0, 10)
    assert own.threads == str(max(1, torch.get_num_threads() // 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [environment(gpu=gpu)["CUDA_VISIBLE_DEVICES"] for gpu in (0, 1, None)] == ["4", "7", "4,7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment(gpu=1)["CUDA_VISIBLE_DEVICES"] == "1"
