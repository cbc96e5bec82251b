"""A server with fewer file descriptors than clients keeps serving and logs one warning per second."""

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

import httpx
import pytest

from server.http.connection_limit import RESERVE, ConnectionLimit, connection_limit
from server.http.listener import MAX_ACCEPTS_PER_TURN, Listener
from server.settings import SettingsError
from tests.server.forked_server import forked_server
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import asked, asking, connected, request
from tests.server.server_process import ServerProcess

MAX_LOG_BYTES = 20_000
NUM_PROBES = 20

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
    return (await asyncio.wait_for(asked(server.url, request("/livez", method="GET")), 10)).status


@pytest.mark.slow
async def test_probes_are_answered_despite_more_silent_clients_than_descriptors(model_folder, tmp_path):
    prepare = partial(files_at_most, (400, 400))
    with forked_server(model_folder, tmp_path / "log", prepare=prepare, arrival_seconds=600) as server:
        from_start = server.log()  # a slow start is polled often
        alone = (await asked(server.url, asking(max_tokens=20))).spoken()
        with silent_clients(server, 500):
            assert [await livez(server) for _ in range(NUM_PROBES)] == [200] * NUM_PROBES
            refused = await asked(server.url, asking(max_tokens=20))
            assert (refused.status, refused.json()["error"]["code"]) == (503, "too_many_connections")
            await asyncio.sleep(2)  # the excess connections are closed
            before = cpu_seconds(server.process.pid)
            await asyncio.sleep(2)
            assert cpu_seconds(server.process.pid) - before < 0.5
            assert await livez(server) == 200
        wait_until(lambda: httpx.get(f"{server.url}/v1/models").status_code == 200)
        assert (await asked(server.url, asking(max_tokens=20))).spoken() == alone
        lines = [json.loads(line) for line in server.log().splitlines()]
        assert "connections reduced to fit the limit of open files" in {line["event"] for line in lines}
        assert sum(line["event"] == "too many connections" for line in lines) < 10
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


async def test_an_excess_connection_is_closed_after_one_probe(byte_model):
    probe = request("/livez", method="GET")
    with live_server(byte_model, max_connections=1) as server:
        async with connected(server.url) as within:
            for _ in range(2):
                answer = await within.ask(probe)
                assert (answer.status, answer.headers.get("connection")) == (200, None)
            async with AsyncExitStack() as never_closed:
                for _ in range(RESERVE):
                    beyond = await never_closed.enter_async_context(connected(server.url))
                    answer = await beyond.ask(probe)
                    assert (answer.status, answer.headers["connection"]) == (200, "close")
                    assert not await beyond.has_answer()


@pytest.mark.slow
async def test_the_soft_limit_of_files_is_raised_to_the_hard_one(model_folder, tmp_path):
    with forked_server(model_folder, tmp_path / "log", prepare=partial(files_at_most, (100, 2_000))) as server:
        with silent_clients(server, 400):
            assert (await asked(server.url, asking(max_tokens=2))).status == 200
        assert '"allowed"' in server.log()  # 4,096 are more than 2,000 files


def test_room_is_bounded_by_the_setting_and_the_descriptors(monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert connection_limit(10).num_connections == 10
    assert connection_limit(10**9).num_connections == limit - RESERVE
    assert connection_limit(10**9, descriptors_per_connection=2).num_connections == (limit - RESERVE) // 2
    monkeypatch.setattr("server.http.connection_limit.RESERVE", limit)
    with pytest.raises(SettingsError, match=r"^max_connections: a limit of \d+ open files leaves no room"):
        connection_limit(10)


class Held:
    def __init__(self, connections: ConnectionLimit) -> None:
        self._connections = connections

    def refuse_as_too_many(self) -> None:
        self._connections.release(self)


def test_the_oldest_excess_connection_without_a_probe_is_refused_first():
    connections = ConnectionLimit(0, num_excess=2)
    first, second, third, fourth, fifth = (Held(connections) for _ in range(5))
    connections.add_excess(first)
    connections.add_excess(second)
    assert connections.admits(first, b"GET /livez HTTP/1.1\r\n")
    assert not connections.admits(second, b"GET /livez?x HTTP/1.1\r\n")
    connections.add_excess(third)
    assert [connections.is_excess(held) for held in (first, second, third)] == [True, False, True]
    assert connections.admits(third, b"HEAD /readyz HTTP/1.0\r\n")
    connections.add_excess(fourth)
    assert not connections.is_excess(fourth)
    connections.release(first)
    connections.add_excess(fifth)
    assert connections.is_excess(fifth)


def test_a_listener_accepts_a_few_at_a_time():
    with Listener(socket.create_server(("127.0.0.1", 0))) as listener, ExitStack() as stack:
        listener.setblocking(False)
        for _ in range(MAX_ACCEPTS_PER_TURN + 2):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        assert [num_accepted(listener, stack) for _ in range(3)] == [MAX_ACCEPTS_PER_TURN, 2, 0]


def num_accepted(listener: Listener, stack: ExitStack) -> int:
    """Accept connections until none is waiting, and return their number."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            stack.enter_context(listener.accept()[0])
            number += 1
    return number
