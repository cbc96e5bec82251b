"""Three nodes of Ray on this machine. `make ray` runs these tests: they need an environment with Ray."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.live_server import wait_until
from tests.server.ray_cluster import KEY, RayCluster, ray_cluster

pytest.importorskip("ray", reason="`make ray` installs Ray")

START_SECONDS = 120
HANG_SECONDS = 30
NUM_CLIENTS, PAUSE_SECONDS = 4, 0.3
REQUEST: dict[str, Any] = {"model": "default", "prompt": "Once", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}


@dataclass
class Load:
    """Outcomes of requests by an SDK with its own retries. `cut` streams had begun. Every second request streams."""

    num_whole: int = 0
    num_streams: int = 0
    num_cut: int = 0
    failed: list[Exception] = field(default_factory=list)
    has_ended: bool = False

    async def client(self, url: str, number: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60) as client:
            while not self.has_ended:
                number += 1
                await (self._streamed(client) if number % 2 else self._whole(client))
                await asyncio.sleep(PAUSE_SECONDS)

    async def _whole(self, client: openai.AsyncOpenAI) -> None:
        try:
            answer = await client.completions.create(**REQUEST)
            assert answer.choices[0].finish_reason == "length"
            self.num_whole += 1
        except Exception as error:
            self.failed.append(error)

    async def _streamed(self, client: openai.AsyncOpenAI) -> None:
        last = None
        try:
            async for chunk in await client.completions.create(**REQUEST, stream=True):
                last = chunk
            assert last.choices[0].finish_reason == "length"
            self.num_streams += 1
        except Exception as error:
            if last:
                self.num_cut += 1
            else:
                self.failed.append(error)


@asynccontextmanager
async def load_on(cluster: RayCluster) -> AsyncIterator[Load]:
    """Send requests, and let the last ones finish."""
    load = Load()
    clients = [asyncio.create_task(load.client(cluster.url, number)) for number in range(NUM_CLIENTS)]
    yield load
    load.has_ended = True
    await asyncio.gather(*clients)


async def until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> float:
    return await asyncio.to_thread(wait_until, condition, seconds)


def start_node(cluster: RayCluster) -> None:
    node = cluster.add_node()
    wait_until(lambda: node.has_started, START_SECONDS)


@pytest.fixture(scope="module")
def cluster(model_folder: Path) -> Iterator[RayCluster]:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # a short path
        ray_cluster(Path(folder)) as cluster,
        ThreadPoolExecutor() as pool,
    ):
        start_node(cluster)
        deployed = pool.submit(cluster.deploy, {"downscale_delay_s": 600}, model=str(model_folder))
        start_node(cluster)
        start_node(cluster)
        deployed.result()
        with httpx.Client(base_url=cluster.url, timeout=START_SECONDS) as http:
            wait_until(lambda: http.get("/readyz").status_code == 200, START_SECONDS)
        yield cluster


def test_a_replica_checks_keys_has_one_request_id_and_cancels_a_request_whose_client_leaves(cluster):
    endless = {"model": "default", "prompt": "Once", "n": 64, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=cluster.url, timeout=START_SECONDS) as http:
        refused = http.post("/v1/completions", json=endless)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        http.headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
        answer = http.get("/v1/models")
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.json()["data"][0]["nvium"]["exit_layers"]
        with http.stream("POST", "/v1/completions", json=endless) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        cancelled = 'nvium_requests_total{endpoint="completions",outcome="cancelled"} 1.0'
        wait_until(lambda: cancelled in http.get("/metrics").text)


async def test_replicas_are_added_on_other_nodes_under_load(cluster):
    async with load_on(cluster) as load:
        await until(lambda: len(cluster.replicas()) == 2)
        assert max(len(node.replicas()) for node in cluster.nodes) == 1
    assert load.num_whole and load.num_streams
    assert (load.num_cut, load.failed) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_replica_that_hangs_or_dies_is_replaced_and_fails_no_request_that_had_not_begun(cluster, number):
    async with load_on(cluster) as load:
        lost = min(cluster.replicas())
        os.kill(lost, number)
        await until(lambda: lost not in cluster.replicas(), HANG_SECONDS)
        await until(lambda: len(cluster.replicas()) == 2)
    assert load.failed == []
    assert load.num_cut <= NUM_CLIENTS


async def test_a_node_that_dies_fails_no_request_that_had_not_begun(cluster):
    async with load_on(cluster) as load:
        lost = next(node for node in cluster.nodes[1:] if node.replicas())  # not the head, which replaces replicas
        cluster.nodes.remove(lost)
        lost.kill()
        await until(lambda: len(cluster.replicas()) == 2)
    assert load.failed == []
    assert load.num_cut <= NUM_CLIENTS


async def test_a_new_version_cuts_no_stream(cluster, model_folder):
    async with load_on(cluster) as load:
        old = cluster.replicas()
        scaling = {"initial_replicas": 2, "downscale_delay_s": 4}
        await asyncio.to_thread(cluster.deploy, scaling, model=str(model_folder), max_sequences=8)
        await until(lambda: len(cluster.replicas() - old) == 2)
    assert load.num_streams
    assert (load.num_cut, load.failed) == (0, [])


def test_an_idle_replica_is_removed_and_rays_metrics_have_ours(cluster):
    wait_until(lambda: len(cluster.replicas()) == 1, START_SECONDS)
    pages = [httpx.get(node.metrics_url).text for node in cluster.nodes]
    assert any("ray_nvium_requests_total{" in page and 'outcome="completed"' in page for page in pages)
