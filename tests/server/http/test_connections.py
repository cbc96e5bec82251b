"""A server with fewer places or file descriptors than clients keeps serving and logs one warning per second."""

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import h11
import httpx
import pytest

from server.http.connections import BYTES_PER_CHUNK, FREE_CHUNKS, FRESH_SECONDS, MAX_FRESH, MAX_HEAD_BYTES, Parser
from server.http.server import RESERVE, connection_limit
from server.settings import SettingsError
from tests.server.forked_server import forked_server
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import PATHS, RawConnection, asked, asking, chunked, connected, request
from tests.server.server_process import ServerProcess

MAX_LOG_BYTES = 20_000
NUM_PROBES = 20
PROBE = request("/livez", method="GET")

files_at_most = partial(resource.setrlimit, resource.RLIMIT_NOFILE)
"""Limits the descriptors to a soft and a hard number."""


@contextmanager
def silent_clients(server: ServerProcess, number: int) -> Iterator[list[socket.socket]]:
    address = (server.http.base_url.host, server.http.base_url.port)
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(number)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def livez(server: ServerProcess) -> int:
    """Probe the server on a new connection."""
    return (await asyncio.wait_for(asked(server.url, PROBE), 10)).status


@pytest.mark.slow
async def test_requests_are_answered_despite_more_silent_clients_than_descriptors(model_folder, tmp_path):
    prepare = partial(files_at_most, (400, 400))
    with forked_server(model_folder, tmp_path / "log", prepare=prepare, arrival_seconds=600) as server:
        from_start = server.log()  # a slow start is polled often
        alone = (await asked(server.url, asking(max_tokens=20))).spoken()
        with silent_clients(server, 500):
            assert [await livez(server) for _ in range(NUM_PROBES)] == [200] * NUM_PROBES
            assert (await asked(server.url, asking(max_tokens=20))).spoken() == alone
            before = cpu_seconds(server.process.pid)
            await asyncio.sleep(2)
            assert cpu_seconds(server.process.pid) - before < 0.5
            assert await livez(server) == 200
        wait_until(lambda: httpx.get(f"{server.url}/v1/models").status_code == 200)
        assert (await asked(server.url, asking(max_tokens=20))).spoken() == alone
        lines = [json.loads(line) for line in server.log().splitlines()]
        assert "connections reduced to fit the limit of open files" in {line["event"] for line in lines}
        assert sum(line["event"].startswith("closed waiting connections") for line in lines) < 10
        assert len(server.log()) - len(from_start) < MAX_LOG_BYTES


@pytest.mark.slow
async def test_a_probe_after_a_burst_of_silent_clients_is_answered(model_folder, tmp_path):
    prepare = partial(files_at_most, (200, 200))
    with forked_server(model_folder, tmp_path / "log", prepare=prepare, arrival_seconds=600) as server:
        with silent_clients(server, 140):
            assert await livez(server) == 200
            server.process.send_signal(signal.SIGSTOP)
            with silent_clients(server, 60):
                probe = asyncio.create_task(livez(server))
                await asyncio.sleep(0.2)  # all clients wait to be accepted
                server.process.send_signal(signal.SIGCONT)
                assert await probe == 200
        assert "out of system resource" not in server.log()


async def is_closed(connection: RawConnection) -> bool:
    """Wait for the end of the connection. Return whether it came without a response."""
    with suppress(ConnectionError):
        return await asyncio.wait_for(connection.reader.read(), 10) == b""
    return True


async def test_a_new_connection_takes_the_place_of_the_oldest_silent_else_idle_or_sending(byte_model, monkeypatch):
    monkeypatch.setattr("server.http.server.NUM_CLOSING", 1)
    long = asking(max_tokens=4000, n=2, stream=True)
    with live_server(byte_model, max_connections=5) as server:
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(connected(server.url)) for _ in range(5)]
            working, idle, silent, younger, sending = opened
            await working.send(long)
            await working.head()
            assert (await idle.ask(PROBE)).status == 200
            await sending.send(long[:-5])
            await asyncio.sleep(FRESH_SECONDS)
            for loser in (silent, younger, idle, sending):
                newcomer = await stack.enter_async_context(connected(server.url))
                await newcomer.send(long)
                assert (await newcomer.head())[0] == 200
                assert await is_closed(loser)
            refused = await asked(server.url, long)
            assert (refused.status, refused.body) == (503, b"Service Unavailable")
            assert await working.chunk()
        await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == 0)
        assert server.gauge("nvium_evicted_connections_total") == 4


async def test_silent_connections_beyond_the_limit_are_closed_and_the_others_live_on(byte_model):
    with live_server(byte_model, max_connections=20) as server:
        async with AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(server.url)) for _ in range(25)]
            assert (await silent[-1].ask(PROBE)).status == 200
            assert [await is_closed(connection) for connection in silent[:5]] == [True] * 5
            assert (await silent[5].ask(PROBE)).status == 200


@pytest.mark.parametrize(("number", "max_tokens", "statuses"), [(20, 1, {200}), (20 + MAX_FRESH, 400, {200, 503})])
async def test_a_burst_of_new_connections_resets_none_of_them(byte_model, number, max_tokens, statuses):
    """Idle ones make room for the first burst. In the second one, more come than may be at work."""

    with live_server(byte_model, max_connections=20) as server:
        async with AsyncExitStack() as stack:
            for _ in range(20):
                idle = await stack.enter_async_context(connected(server.url))
                assert (await idle.ask(PROBE)).status == 200
            burst = [asked(server.url, asking(max_tokens=max_tokens)) for _ in range(number)]
            assert {answer.status for answer in await asyncio.gather(*burst)} <= statuses


async def test_a_head_that_arrives_in_pieces_is_bounded(server):
    async with connected(server.url) as connection:
        await connection.ask(PROBE)
        for _ in range(2):
            await connection.send(PROBE[:-2] + b"x: " + b"y" * (MAX_HEAD_BYTES // 2))
            await asyncio.sleep(0.1)
        assert (await connection.answer()).status == 400


@pytest.mark.parametrize(("host", "pause", "status"), [("localhost", 0.1, 400), ("evil", 0, 400), ("evil", 0.1, 403)])
async def test_a_body_that_breaks_off_is_refused_without_a_log_line(server, caplog, host, pause, status):
    """The app waits for the body, is about to respond, or has responded."""
    head = request(PATHS[0], is_chunked=True).removesuffix(chunked(b"")).replace(b"localhost", host.encode())
    async with connected(server.url) as connection:
        for piece in (head, b"zz\r\n") if pause else (head + b"zz\r\n",):
            await connection.send(piece)
            await asyncio.sleep(pause)
        assert (await connection.head())[0] == status
        await is_closed(connection)
    assert not caplog.records


def fed(sizes: list[int]) -> None:
    """Parse a chunked body with chunks of these sizes."""
    parser = Parser(h11.SERVER, MAX_HEAD_BYTES)
    parser.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    for size in sizes:
        parser.receive_data(b"%x\r\n%b\r\n" % (size, b" " * size))
        assert isinstance(parser.next_event(), h11.Data)


def test_a_body_may_have_only_some_small_chunks():
    fed([1] * FREE_CHUNKS)
    fed([1] * (FREE_CHUNKS - 10) + [BYTES_PER_CHUNK] * 5_000)
    with pytest.raises(h11.RemoteProtocolError, match="too small"):
        fed([1] * (FREE_CHUNKS + 10))


@pytest.mark.slow
async def test_the_soft_limit_of_files_is_raised_to_the_hard_one(model_folder, tmp_path):
    with forked_server(model_folder, tmp_path / "log", prepare=partial(files_at_most, (100, 2_000))) as server:
        with silent_clients(server, 400):
            assert (await asked(server.url, asking(max_tokens=2))).status == 200
        assert '"allowed"' in server.log()  # 4,096 are more than 2,000 files


def test_room_is_bounded_by_the_setting_and_the_descriptors(monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert connection_limit(10) == 10
    assert connection_limit(10**9) == limit - RESERVE
    assert connection_limit(10**9, descriptors_per_connection=2) == (limit - RESERVE) // 2
    monkeypatch.setattr("server.http.server.RESERVE", limit)
    with pytest.raises(SettingsError, match=r"^max_connections: a limit of \d+ open files leaves no room"):
        connection_limit(10)
