"""The gateway: which replica a request goes to, and what happens when a replica dies."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.middleware import Middleware

from nvium_core import LoadedModel
from server.app import assemble
from server.errors import engine_stopped
from server.generation.service import Service
from server.http.config import uvicorn_config
from server.http.drain import DrainingServer
from server.http.keys import ApiKey, KeyRing
from server.replicas.gateway import Gateway, gateway_app
from server.replicas.pool import Address
from server.replicas.relay import GatewayOnly
from server.settings import Settings
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import Answer, asked, connected, post, request
from tests.server.replicas.scripted import EVENTS, SECRET, SILENT, Reply, ScriptedPool, endless, stream, whole

BODY = b"".join(EVENTS)
PLACES = st.integers(0, len(BODY))
"""Byte offsets at which a stream is cut."""
COMPLETION = post("/v1/completions", {"prompt": "Once"})
LOST = {
    "message": "the replica failed while it was answering",
    "type": "server_error",
    "param": None,
    "code": "replica_lost",
}


@asynccontextmanager
async def gateway_for(pool: ScriptedPool, keys: tuple[ApiKey, ...] = ()) -> AsyncIterator[tuple[str, Gateway]]:
    """Run a gateway on a real socket, in this event loop."""
    options = Settings()
    gateway = Gateway(pool, options)
    server = DrainingServer(uvicorn_config(gateway_app(gateway, KeyRing(keys)), options, port=0), gateway)
    serving = asyncio.create_task(server.serve())
    await asyncio.to_thread(wait_until, lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", gateway
    finally:
        server.should_exit = True
        await serving


async def answered(pool: ScriptedPool, data: bytes = COMPLETION) -> Answer:
    async with gateway_for(pool) as (url, gateway):
        answer = await asked(url, data)
    assert (pool.num_busy, gateway.admission.num_present) == (0, 0)
    return answer


async def test_a_replica_receives_the_keys_id_but_not_the_key():
    pool = ScriptedPool([whole(b"{}")])
    async with gateway_for(pool, keys=(ApiKey("alice", bytes(32)),)) as (url, _):
        refused = await asked(url, COMPLETION)
    assert (refused.status, pool.received) == (401, [])
    headers = {"content-type": "application/json", "authorization": "Bearer sk-a", "x-request-id": "mine"}
    headers |= {"x-nvium-key-id": "root", "x-nvium-secret": "guessed", "cookie": "a=b"}
    await answered(pool, post("/v1/completions", {"prompt": "Once"}, headers=headers))
    [received] = pool.received
    assert b"\r\nx-request-id: mine\r\n" in received
    assert b"\r\nx-nvium-secret: %b\r\n" % SECRET.encode() in received
    assert b"\r\nx-nvium-key-id: \r\n" in received
    assert received.endswith(json.dumps({"prompt": "Once"}).encode())
    for removed in (b"sk-a", b"root", b"guessed", b"cookie"):
        assert removed not in received


@pytest.mark.parametrize("lost", [SILENT, whole(b'{"a": 1}', sent=3), stream(BODY, sent=0), stream(BODY, sent=5)])
@pytest.mark.parametrize("found", [whole(b"{}"), stream(BODY)])
async def test_a_response_that_has_not_begun_is_retried_at_another_replica(lost, found):
    pool = ScriptedPool([lost, lost, found])
    answer = await answered(pool)
    assert (answer.status, answer.body) == (200, b"{}" if found == whole(b"{}") else BODY)
    assert len(pool.received) == 3
    assert len({request.partition(b"\r\n\r\n")[2] for request in pool.received}) == 1


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [([], 503, "no_replica"), ([SILENT] * 2, 503, "no_replica"), ([SILENT] * 9, 500, "replicas_lost")],
)
async def test_a_request_is_sent_to_at_most_three_replicas(script, status, code):
    pool = ScriptedPool([*script])
    answer = await answered(pool)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert len(pool.received) == min(len(script), 3)
    assert status == 500 or int(answer.headers["retry-after"]) > 0


async def test_a_request_to_a_replica_whose_engine_has_stopped_is_retried():
    body = json.dumps(engine_stopped().body).encode()
    stopped = Reply(
        [b"HTTP/1.1 503 Gone\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body]
    )
    answer = await answered(ScriptedPool([stopped, whole(b'{"a": 1}')]))
    assert (answer.status, answer.body) == (200, b'{"a": 1}')
    assert answer.headers["content-type"] == "application/json"


@settings(max_examples=25, deadline=None)
@given(st.lists(PLACES, max_size=6), PLACES)
async def test_a_stream_in_any_pieces_is_forwarded_in_whole_events(cuts, sent):
    assert (await answered(ScriptedPool([stream(BODY, cuts=cuts)]))).body == BODY
    answer = await answered(ScriptedPool([stream(BODY, cuts=cuts, sent=sent), whole(b'"anew"')]))
    *events, _ = BODY[:sent].split(b"\n\n")
    if events:
        *forwarded, error, done, end = answer.body.split(b"\n\n")
        assert (forwarded, done, end) == (events, b"data: [DONE]", b"")
        assert json.loads(error.removeprefix(b"data: ")) == {"error": LOST}
    else:
        assert answer.body == b'"anew"'


async def test_lost_replicas_are_counted_on_the_metrics_page():
    async with gateway_for(ScriptedPool([SILENT, whole(b"{}"), stream(BODY, sent=len(EVENTS[0]))])) as (url, _):
        for _ in range(2):
            await asked(url, COMPLETION)
        page = (await asked(url, request("/metrics", method="GET"), "GET")).body.decode()
    assert 'nvium_moved_requests_total{replica="front"} 1.0' in page
    assert 'nvium_broken_streams_total{replica="front"} 1.0' in page
    assert 'nvium_requests_total{endpoint="completions",outcome="failed",replica="front"} 1.0' in page
    assert 'outcome="completed"' not in page


async def test_a_client_that_disconnects_is_disconnected_from_its_replica():
    pool = ScriptedPool([endless(BODY)])
    async with gateway_for(pool) as (url, gateway):
        async with connected(url) as connection:
            await connection.send(COMPLETION)
            await connection.head()
            assert gateway.admission.num_present == 1
        await asyncio.to_thread(wait_until, lambda: not (gateway.admission.num_present or pool.num_busy))


async def test_a_draining_gateway_refuses_requests_and_can_end_open_ones():
    pool = ScriptedPool([endless(BODY)])
    async with gateway_for(pool) as (url, gateway), connected(url) as connection:
        await connection.send(COMPLETION)
        await connection.head()
        gateway.admission.is_leaving = gateway.admission.is_draining = True
        refused = await asked(url, COMPLETION)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        for path in ("/readyz", "/health"):
            assert (await asked(url, request(path, method="GET"), "GET")).status == 503
        assert (await asked(url, request("/livez", method="GET"), "GET")).status == 200
        gateway.give_up()
        assert (await connection.rest()).endswith(b'"code":"replica_lost"}}\n\ndata: [DONE]\n\n')


async def test_a_replica_answers_only_its_gateway(byte_model):
    def build(model: LoadedModel, options: Settings) -> object:
        service = Service(model, options)
        return assemble(service, Middleware(GatewayOnly, secret=SECRET))

    with live_server(byte_model, build=build) as replica:
        for path in ("/v1/models", "/metrics", "/livez", "/nowhere"):
            for headers in ({}, {"x-nvium-secret": "guessed"}, {"x-nvium-secret": ""}):
                assert replica.http.get(path, headers=headers).status_code == 401
        assert replica.http.get("/v1/models", headers={"x-nvium-secret": SECRET}).status_code == 200
        address = Address(name="one", url=replica.url, secret=SECRET)
    assert SECRET not in repr(address)


PAGE = b"# TYPE nvium_requests_waiting gauge\nnvium_requests_waiting 3.0\n"
METRICS = Reply([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(PAGE), PAGE)])


@dataclass
class HangingPool(ScriptedPool):
    """Knows a replica with metrics and one that never answers. Listing them blocks while `hangs`."""

    known: list[Address] = field(default_factory=list)
    hangs: bool = False

    async def all(self) -> list[Address]:
        if self.hangs:
            await asyncio.Event().wait()
        return self.known


async def test_probes_and_metrics_skip_a_replica_that_hangs():
    pool = HangingPool([METRICS, SILENT])
    async with pool.chosen(()) as first, pool.chosen(()) as second, gateway_for(pool) as (url, _):
        pool.known = [first, second]
        for pool.hangs in (False, True):
            ready = await asked(url, request("/readyz", method="GET"))
            metrics = await asked(url, request("/metrics", method="GET"))
            assert ready.status == 200
            assert f'nvium_requests_waiting{{replica="{first.name}"}} 3.0' in metrics.body.decode()
            assert f'replica="{second.name}"' not in metrics.body.decode()
        pool.hangs, pool.known = False, []
        assert (await asked(url, request("/readyz", method="GET"))).status == 503
