"""Slow clients: a minimum rate, and a limit on what all of them leave unread."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI, Response

from server.http.connection import Connection
from server.http.unread import UnreadBytes
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import connected, request

LARGE_BYTES = 20_000_000


@dataclass(eq=False)
class Slow:
    num_unread: int
    key: str = ""
    is_cut_off: bool = field(default=False)

    def cut_off(self) -> None:
        self.is_cut_off = True


def test_the_key_with_the_most_unread_bytes_loses_its_slowest_connection():
    unread = UnreadBytes(100)
    modest, first, second = Slow(40, "a"), Slow(30, "b"), Slow(25, "b")
    for reader in (modest, first, second):
        unread.add(reader)
    assert not any(reader.is_cut_off for reader in (modest, first, second))
    unread.add(third := Slow(10, "b"))
    assert [reader.is_cut_off for reader in (modest, first, second, third)] == [False, True, False, False]


def test_bytes_that_were_read_no_longer_count_and_a_lone_response_may_be_larger():
    unread = UnreadBytes(100)
    unread.add(lone := Slow(500))
    lone.num_unread = 10
    unread.add(Slow(60))
    unread.remove(lone)
    unread.add(Slow(40))
    assert not lone.is_cut_off


def add_large(app: FastAPI) -> None:
    app.get("/large")(lambda: Response(b"x" * LARGE_BYTES))


def drip(port: int, until: Callable[[], bool]) -> None:
    """Read 600 bytes a second, for at most a minute."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect(("127.0.0.1", port))
        client.sendall(request("/large", method="GET"))
        started = time.monotonic()
        while not until() and time.monotonic() < started + 60:
            client.recv(30)
            time.sleep(0.05)


def numbers_unread_at_cut_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of unread bytes of every connection that is cut off."""
    numbers, cut_off = list[int](), Connection.cut_off

    def noted(connection: Connection) -> None:
        numbers.append(connection.num_unread)
        cut_off(connection)

    monkeypatch.setattr(Connection, "cut_off", noted)
    return numbers


async def test_a_client_below_the_minimum_rate_is_cut_off(byte_model, monkeypatch):
    """The client may go on reading what its own and the server's kernel hold."""
    num_unread = numbers_unread_at_cut_off(monkeypatch)
    with live_server(byte_model, add_large, slow_client_seconds=3) as server:
        await asyncio.to_thread(drip, server.listener.getsockname()[1], lambda: bool(num_unread))
    assert len(num_unread) == 1
    assert num_unread[0] > 1_000_000


async def test_many_slow_clients_leave_a_limited_number_of_bytes_unread(byte_model, monkeypatch):
    num_unread = numbers_unread_at_cut_off(monkeypatch)
    limits = {"max_body_bytes": 1_000_000, "max_present_bytes": 5_000_000}  # 40 MB unread
    with live_server(byte_model, add_large, **limits) as server:
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(connected(server.url)) for _ in range(6)]
            for connection in opened:
                connection.writer.transport.pause_reading()
                await connection.send(request("/large", method="GET"))
            await asyncio.to_thread(wait_until, lambda: bool(num_unread))
            num_whole = 0
            for connection in opened:
                connection.writer.transport.resume_reading()
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    num_whole += len((await connection.answer()).body) == LARGE_BYTES
    assert 1 <= num_whole < len(opened)
