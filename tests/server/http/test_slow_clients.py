"""Requests that arrive slowly, clients that read slowly, and idle connections."""

import asyncio
import resource
import socket
import threading
import time
from asyncio import IncompleteReadError
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import Response

from nvium_core import LoadedModel
from nvium_core.engine.schedule import scheduler
from server.http import connections
from server.settings import Settings
from tests.server.http.test_keys import bearer
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import Answer, RawConnection, asked, asking, connected, request

MUCH: dict[str, Any] = {"max_tokens": 500, "n": 2, "return_token_ids": True}
"""A response larger than all buffers between server and client."""

BESIDE = asking(max_tokens=200, stream=True)


@pytest.fixture(scope="module")
def impatient(byte_model: LoadedModel) -> Iterator[LiveServer]:
    limits = {"slow_client_seconds": 0.5, "arrival_seconds": 1}
    with pytest.MonkeyPatch.context() as patch, live_server(byte_model, **limits) as server:
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


async def test_a_body_that_does_not_arrive_in_time_gets_a_408(impatient):
    async with connected(impatient.url) as connection:
        await connection.send(BESIDE[:-1])
        answer = await asyncio.wait_for(connection.answer(), 30)
        assert (answer.status, answer.json()["error"]["code"]) == (408, "request_timeout")
        assert impatient.gauge('nvium_rejected_total{reason="request_timeout"}') > 0
        assert answer.headers["x-request-id"]
        connection.writer.write_eof()
        assert await connection.reader.read() == b""


async def test_slow_bytes_do_not_extend_the_timeout(impatient):
    async with connected(impatient.url) as connection:
        head, end, body = BESIDE.partition(b"\r\n\r\n")
        await connection.send(head + end)
        answering = asyncio.create_task(connection.answer())
        for byte in body:
            if not answering.done():
                await connection.send(bytes([byte]))
                await asyncio.sleep(0.02)
        assert (await answering).status == 408


@pytest.mark.parametrize("size", [0, 1, 30])
async def test_a_silent_connection_and_a_late_head_are_closed_without_a_response(impatient, size):
    async with connected(impatient.url) as connection:
        await connection.send(BESIDE[:size])
        assert await asyncio.wait_for(connection.reader.read(), 30) == b""


async def test_a_later_head_that_does_not_arrive_in_time_closes_the_connection(impatient):
    async with connected(impatient.url) as connection:
        assert (await connection.ask(PROBE)).status == 200
        await connection.send(PROBE[:-1])
        assert await asyncio.wait_for(connection.reader.read(), 30) == b""


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


async def test_a_request_that_races_the_keep_alive_timeout_is_answered(byte_model):
    """While the event loop is blocked, the timeout passes and the next request arrives."""
    is_blocked, has_sent = threading.Event(), threading.Event()

    async def block() -> None:
        is_blocked.set()
        has_sent.wait(30)

    with live_server(byte_model, lambda app: app.get("/block")(block), http_keep_alive_seconds=0.5) as server:
        async with connected(server.url) as client, connected(server.url) as blocker:
            assert (await client.ask(PROBE)).status == 200
            await blocker.send(request("/block", method="GET"))
            assert is_blocked.wait(30)
            await asyncio.sleep(1)
            await client.send(asking(max_tokens=1))
            has_sent.set()
            assert (await client.answer()).status == 200


LARGE_BYTES = 20_000_000
LARGE = request("/large", method="GET")


def add_large(app: FastAPI) -> None:
    app.get("/large")(lambda: Response(b"x" * LARGE_BYTES))


def drip(port: int, until: Callable[[], bool]) -> None:
    """Read 600 bytes a second, for at most a minute."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect(("127.0.0.1", port))
        client.sendall(LARGE)
        started = time.monotonic()
        while not until() and time.monotonic() < started + 60:
            client.recv(30)
            time.sleep(0.05)


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list that gets the key and the number of unread bytes of every connection that is cut off."""
    found, cut_off = list[tuple[str, int]](), connections.cut_off

    def noted(connection: Any) -> None:
        found.append((connections.key_of(connection), connections.num_unread(connection)))
        cut_off(connection)

    monkeypatch.setattr(connections, "cut_off", noted)
    return found


async def test_a_client_below_the_minimum_rate_is_cut_off(byte_model, cut_off):
    """The client may go on reading what its own and the server's kernel hold."""
    with live_server(byte_model, add_large, slow_client_seconds=3) as server:
        await asyncio.to_thread(drip, server.listener.getsockname()[1], lambda: bool(cut_off))
    [(_, num_unread)] = cut_off
    assert num_unread > 1_000_000


async def test_many_slow_clients_leave_a_limited_number_of_bytes_unread(byte_model, cut_off):
    """The key with the most unread bytes loses the connection that has waited for the longest time."""
    limits = {"max_body_bytes": 1_000_000, "max_present_bytes": 5_000_000}  # 40 MB unread
    with live_server(byte_model, add_large, api_keys="modest:sk-m,greedy:sk-g", **limits) as server:
        async with AsyncExitStack() as stack:

            async def started(key: str) -> RawConnection:
                connection = await stack.enter_async_context(connected(server.url))
                connection.writer.transport.pause_reading()
                await connection.send(request("/large", method="GET", headers=bearer(key)))
                return connection

            modest = await started("sk-m")
            greedy = [await started("sk-g") for _ in range(5)]
            await asyncio.to_thread(wait_until, lambda: len(cut_off) >= 4)
            for connection in (modest, *greedy):
                connection.writer.transport.resume_reading()
            answers = await asyncio.gather(*(connection.answer() for connection in greedy), return_exceptions=True)
            assert len((await modest.answer()).body) == LARGE_BYTES
    assert [key for key, _ in cut_off] == ["greedy"] * len(cut_off)
    assert 1 <= sum(isinstance(answer, Answer) for answer in answers) < len(greedy)
