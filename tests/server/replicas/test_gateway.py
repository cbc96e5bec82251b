"""The gateway: which replica a request goes to, and what happens when a replica dies."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import Rejected, engine_stopped
from server.http.server import DrainingServer, uvicorn_config
from server.replicas.fleet import Fleet
from server.replicas.gateway import Gateway, gateway_app
from server.settings import Settings
from server.telemetry.metrics import Metrics
from tests.server.live_server import wait_until
from tests.server.raw_client import Answer, asked, connected, post, request
from tests.server.replicas.scripted import EVENTS, SILENT, Reply, ScriptedFleet, endless, stream, whole

BODY = b"".join(EVENTS)
MUCH = 2**25  # more bytes than the sockets buffer
PLACES = st.integers(0, len(BODY))
"""Byte offsets at which a stream is cut."""
COMPLETION = post("/v1/completions", {"prompt": "Once"})
PAGE = b"# TYPE nvium_requests_waiting gauge\nnvium_requests_waiting 3.0\n"
METRICS = Reply([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(PAGE), PAGE)])
LOST = {
    "message": "the replica failed while it was answering",
    "type": "server_error",
    "param": None,
    "code": "replica_lost",
}


@asynccontextmanager
async def gateway_for(fleet: ScriptedFleet, **options: str) -> AsyncIterator[tuple[str, Gateway]]:
    """Run a gateway on a real socket, in this event loop."""
    settings = Settings(**options)
    gateway = Gateway(fleet, settings, Metrics())
    server = DrainingServer(uvicorn_config(gateway_app(gateway), settings, port=0), gateway)
    serving = asyncio.create_task(server.serve())
    await asyncio.to_thread(wait_until, lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", gateway
    finally:
        server.should_exit = True
        await serving


async def answered(fleet: ScriptedFleet, data: bytes = COMPLETION) -> Answer:
    async with gateway_for(fleet) as (url, gateway):
        answer = await asked(url, data)
    assert gateway.admission.num_present == 0
    return answer


async def test_a_replica_receives_the_keys_id_but_not_the_key():
    fleet = ScriptedFleet([whole(b"{}")])
    async with gateway_for(fleet, api_keys="alice:sk-a") as (url, _):
        refused = await asked(url, COMPLETION)
    assert (refused.status, fleet.received) == (401, [])
    headers = {"content-type": "application/json", "authorization": "Bearer sk-a", "x-request-id": "mine"}
    headers |= {"x-nvium-key-id": "root", "cookie": "a=b"}
    await answered(fleet, post("/v1/completions", {"prompt": "Once"}, headers=headers))
    [received] = fleet.received
    assert b"\r\nx-request-id: mine\r\n" in received
    assert b"\r\nx-nvium-key-id: \r\n" in received
    assert received.endswith(json.dumps({"prompt": "Once"}).encode())
    for removed in (b"sk-a", b"root", b"cookie"):
        assert removed not in received


@pytest.mark.parametrize("lost", [SILENT, whole(b'{"a": 1}', sent=3), stream(BODY, sent=0), stream(BODY, sent=5)])
@pytest.mark.parametrize("found", [whole(b"{}"), stream(BODY)])
async def test_a_response_that_has_not_begun_is_retried_at_another_replica(lost, found):
    fleet = ScriptedFleet([lost, lost, found])
    answer = await answered(fleet)
    assert (answer.status, answer.body) == (200, b"{}" if found == whole(b"{}") else BODY)
    assert len(fleet.received) == 3
    assert len({request.partition(b"\r\n\r\n")[2] for request in fleet.received}) == 1


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [([], 503, "no_replica"), ([SILENT] * 2, 503, "no_replica"), ([SILENT] * 9, 500, "replicas_lost")],
)
async def test_a_request_is_sent_to_at_most_three_replicas(script, status, code):
    fleet = ScriptedFleet([*script])
    answer = await answered(fleet)
    assert (answer.status, answer.json()["error"]["code"]) == (status, code)
    assert len(fleet.received) == min(len(script), 3)
    assert status == 500 or int(answer.headers["retry-after"]) > 0


async def test_a_request_to_a_replica_whose_engine_has_stopped_is_retried():
    body = json.dumps(engine_stopped().body).encode()
    stopped = Reply(
        [b"HTTP/1.1 503 Gone\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body]
    )
    answer = await answered(ScriptedFleet([stopped, whole(b'{"a": 1}')]))
    assert (answer.status, answer.body) == (200, b'{"a": 1}')
    assert answer.headers["content-type"] == "application/json"


@settings(max_examples=25, deadline=None)
@given(st.lists(PLACES, max_size=6), PLACES)
async def test_a_stream_in_any_pieces_is_forwarded_in_whole_events(cuts, sent):
    assert (await answered(ScriptedFleet([stream(BODY, cuts=cuts)]))).body == BODY
    answer = await answered(ScriptedFleet([stream(BODY, cuts=cuts, sent=sent), whole(b'"anew"')]))
    *events, _ = BODY[:sent].split(b"\n\n")
    if events:
        *forwarded, error, done, end = answer.body.split(b"\n\n")
        assert (forwarded, done, end) == (events, b"data: [DONE]", b"")
        assert json.loads(error.removeprefix(b"data: ")) == {"error": LOST}
    else:
        assert answer.body == b'"anew"'


async def test_lost_replicas_are_counted_on_the_metrics_page():
    async with gateway_for(ScriptedFleet([SILENT, whole(b"{}"), stream(BODY, sent=len(EVENTS[0]))])) as (url, _):
        for _ in range(2):
            await asked(url, COMPLETION)
        page = (await asked(url, request("/metrics", method="GET"), "GET")).body.decode()
    assert 'nvium_moved_requests_total{replica="front"} 1.0' in page
    assert 'nvium_broken_streams_total{replica="front"} 1.0' in page
    assert 'nvium_requests_total{endpoint="completions",outcome="failed",replica="front"} 1.0' in page
    assert 'outcome="completed"' not in page


async def test_a_client_that_disconnects_is_disconnected_from_its_replica():
    fleet = ScriptedFleet([endless(BODY)])
    async with gateway_for(fleet) as (url, gateway):
        async with connected(url) as connection:
            await connection.send(COMPLETION)
            await connection.head()
            assert gateway.admission.num_present == 1
        await asyncio.to_thread(wait_until, lambda: gateway.admission.num_present == 0)


async def test_a_draining_gateway_refuses_requests_and_can_end_open_ones():
    """A stream ends with an error. A JSON response whose client reads slowly is cut off."""
    fleet = ScriptedFleet([endless(BODY), whole(b'"%b"' % (b"a" * MUCH))])
    async with gateway_for(fleet) as (url, gateway), connected(url) as connection, connected(url) as slow:
        for each in (connection, slow):
            await each.send(COMPLETION)
            await each.head()
        gateway.admission.is_leaving = gateway.admission.is_draining = True
        refused = await asked(url, COMPLETION)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        for path in ("/readyz", "/health", "/v1/models"):
            assert (await asked(url, request(path, method="GET"), "GET")).status == 503
        assert (await asked(url, request("/livez", method="GET"), "GET")).status == 200
        gateway.give_up()
        assert (await connection.rest()).endswith(b'"code":"engine_stopped"}}\n\ndata: [DONE]\n\n')
        with pytest.raises(asyncio.IncompleteReadError) as error:
            await slow.reader.readexactly(MUCH + 2)
        assert set(error.value.partial) <= set(b'"a')
        assert b'nvium_broken_streams_total{replica="front"} 0.0' in await gateway.metrics_page()
    assert b'{endpoint="completions",outcome="failed"} 2.0' in gateway.metrics.page()


async def test_metrics_skip_a_replica_that_hangs():
    fleet = ScriptedFleet([METRICS, SILENT])
    async with gateway_for(fleet) as (url, _):
        first, second = [await fleet.chosen(()) for _ in range(2)]
        metrics = await asked(url, request("/metrics", method="GET"))
        assert f'nvium_requests_waiting{{replica="{first.name}"}} 3.0' in metrics.body.decode()
        assert f'replica="{second.name}"' not in metrics.body.decode()
        assert (await asked(url, request("/readyz", method="GET"))).status == 200
        first.is_ready = second.is_ready = False
        assert (await asked(url, request("/readyz", method="GET"))).status == 503


LOADS = [2, 0, 1, 0]


@pytest.mark.parametrize(("ready", "lost", "chosen"), [("0123", "", "13"), ("0123", "13", "2"), ("02", "02", "2")])
async def test_a_request_goes_to_a_least_busy_replica_that_it_has_not_lost(ready, lost, chosen):
    fleet = Fleet(Settings(replicas=4, device="cpu"), Metrics())
    for replica, load in zip(fleet.replicas, LOADS, strict=True):
        replica.is_ready, replica.num_requests = replica.name in ready, load
    found = {(await fleet.chosen([each for each in fleet.replicas if each.name in lost])).name for _ in range(50)}
    assert found == set(chosen)


async def test_a_request_waits_until_a_replica_is_ready(monkeypatch):
    fleet = Fleet(Settings(replicas=1, device="cpu"), Metrics())
    waiting = asyncio.create_task(fleet.chosen(()))
    await asyncio.sleep(0)
    fleet.replicas[0].is_ready = True
    assert await waiting is fleet.replicas[0]
    fleet.replicas[0].is_ready = False
    monkeypatch.setattr("server.replicas.fleet.WAIT_SECONDS", 0)
    with pytest.raises(Rejected):
        await fleet.chosen(())
