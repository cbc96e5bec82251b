"""Requests that arrive slowly, clients that read slowly, and idle connections."""

import asyncio
import resource
import socket
import threading
import time
from asyncio import IncompleteReadError
from collections.abc import Iterator
from typing import Any

import pytest

from nvium_core import LoadedModel
from nvium_core.engine.schedule import scheduler
from server.http.connection import Connection
from server.settings import Settings
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_client import asked, asking, connected, request

MUCH: dict[str, Any] = {"max_tokens": 500, "n": 2, "return_token_ids": True}
"""A response larger than all buffers between server and client."""

BESIDE = asking(max_tokens=200, stream=True)


@pytest.fixture(scope="module")
def impatient(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with (
        pytest.MonkeyPatch.context() as patch,
        live_server(byte_model, slow_client_seconds=0.5, arrival_seconds=1) as server,
    ):
        patch.setattr(scheduler, "MULTI_STEP_SECONDS", 0.0)  # a chunk for every token
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000)
        yield server


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_cut_off_and_delays_nobody(impatient, caplog):
    alone = (await asked(impatient.url, BESIDE)).spoken()
    async with connected(impatient.url, receive_bytes=4_000) as idler:
        await idler.send(asking(**MUCH, stream=True))
        wait_until(lambda: impatient.service.admission.num_present == 2)
        assert (await asked(impatient.url, BESIDE)).spoken() == alone
        await asyncio.to_thread(wait_until, lambda: impatient.service.admission.num_present == 0, seconds=60)
        wait_until(lambda: impatient.gauge("nvium_requests_running") == 0)
        await idler.head()
        with pytest.raises((IncompleteReadError, ConnectionError)):
            await idler.rest()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_slow_reader_gets_everything(impatient):
    alone = (await asked(impatient.url, BESIDE)).spoken()
    async with connected(impatient.url, receive_bytes=4_000) as slow:
        await slow.send(BESIDE)
        await slow.head()
        num_bytes = 0
        while chunk := await slow.chunk():
            num_bytes += len(chunk)
            await asyncio.sleep(0.005)
    assert num_bytes > 20 * len(alone[0])  # a chunk may hold several tokens


@pytest.mark.parametrize("size", [1, 30, 100, -1])
async def test_a_request_that_does_not_arrive_in_time_gets_a_408(impatient, size):
    """The request is cut within its head or within its body."""
    async with connected(impatient.url) as connection:
        await connection.send(BESIDE[:size])
        answer = await connection.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (408, "request_timeout")
        assert impatient.gauge('nvium_rejected_total{reason="request_timeout"}') > 0
        assert answer.headers["x-request-id"]
        assert await connection.reader.read() == b""


async def test_slow_bytes_do_not_extend_the_timeout(impatient):
    async with connected(impatient.url) as connection:
        answering = asyncio.create_task(connection.answer())
        for byte in BESIDE:
            if not answering.done():
                await connection.send(bytes([byte]))
                await asyncio.sleep(0.02)
        assert (await answering).status == 408


async def test_a_silent_connection_is_closed_without_a_response(impatient):
    async with connected(impatient.url) as connection:
        assert await connection.reader.read() == b""


async def test_the_arrival_timeout_does_not_apply_to_responses(impatient):
    async with connected(impatient.url) as connection:
        await connection.send(asking(max_tokens=4000, n=16, stream=True))
        await connection.head()
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            assert await connection.chunk()


def allow_open_files(num_files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(num_files, hard)), hard))


PROBE = request("/livez", method="GET")


async def test_the_latency_of_a_pipelined_request_includes_the_one_before(byte_model):
    with live_server(byte_model) as server, log_lines() as log:
        async with connected(server.url) as connection:
            await connection.send(asking(max_tokens=200) + asking(max_tokens=1))
            assert [(await connection.answer()).status for _ in range(2)] == [200, 200]
        wait_until(lambda: len(log.lines) == 2)
    long, short = log.lines
    assert (long["completion_tokens"], short["completion_tokens"]) == (200, 1)
    assert short["first_token_seconds"] >= long["total_seconds"]


async def test_the_arrival_of_a_body_does_not_count_for_the_next_request(byte_model):
    data = asking(max_tokens=1)
    with live_server(byte_model) as server, log_lines() as log:
        async with connected(server.url) as connection:
            await connection.send(data[:-10])
            await asyncio.sleep(0.1)
            await connection.ask(data[-10:])
            await asyncio.sleep(2)
            started = time.monotonic()
            await connection.ask(data)
            seconds = time.monotonic() - started
        wait_until(lambda: len(log.lines) == 2)
    assert log.lines[1]["total_seconds"] < seconds + 1.5


async def test_an_idle_connection_outlives_the_arrival_timeout(byte_model):
    assert Settings().http_keep_alive_seconds == 75
    with live_server(byte_model, arrival_seconds=1) as server:
        async with connected(server.url) as connection:
            assert (await connection.ask(PROBE)).status == 200
            await asyncio.sleep(2)
            assert (await connection.ask(PROBE)).status == 200


async def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(byte_model):
    with live_server(byte_model, http_keep_alive_seconds=0.2) as server:
        async with connected(server.url) as connection:
            assert (await connection.ask(PROBE)).status == 200
            assert await connection.reader.read() == b""


async def test_a_request_that_races_the_keep_alive_timeout_is_answered(byte_model, monkeypatch):
    connections, is_blocked, has_sent = list[Connection](), threading.Event(), threading.Event()
    connect = Connection.connection_made

    def note(self: Connection, transport: asyncio.BaseTransport) -> None:
        connections.append(self)
        connect(self, transport)

    def run_out() -> None:
        """Let the timeout fire when the next request has arrived but has not been read."""
        is_blocked.set()
        has_sent.wait(30)
        connections[0].timeout_keep_alive_handler()

    monkeypatch.setattr(Connection, "connection_made", note)
    with live_server(byte_model) as server:
        async with connected(server.url) as client:
            assert (await client.ask(PROBE)).status == 200
            connections[0].loop.call_soon_threadsafe(run_out)
            assert is_blocked.wait(30)
            await client.send(asking(max_tokens=1))
            has_sent.set()
            assert (await client.answer()).status == 200
