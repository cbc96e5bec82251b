"""A response that is sent before its request was read arrives, although the client is still sending."""

import asyncio
from collections import Counter

import pytest

from tests.server.live_server import live_server
from tests.server.raw_client import JSON, PATHS, connected, request

LARGE = b" " * 9_000_000
TIMES = 20

EARLY = {
    "a declared length": (413, request(PATHS[0], LARGE, headers=JSON)),
    "chunks": (413, request(PATHS[0], LARGE, headers=JSON, is_chunked=True)),
    "another host": (403, request(PATHS[0], LARGE, headers=JSON).replace(b"localhost", b"evil.example")),
}


async def status(url: str, data: bytes) -> int:
    """Send everything before reading, as many clients do, and return the status, or 0 after a reset."""
    async with connected(url) as connection:
        try:
            connection.writer.write(data)
            await connection.writer.drain()
            return (await connection.answer()).status
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0


@pytest.mark.parametrize("case", EARLY)
async def test_an_early_response_arrives(server, case):
    expected, data = EARLY[case]
    assert Counter([await status(server.url, data) for _ in range(TIMES)]) == {expected: TIMES}


async def test_the_refusal_of_a_late_request_arrives(byte_model):
    late = request(PATHS[0], LARGE[:1_000_000], headers=JSON)
    with live_server(byte_model, arrival_seconds=0.5) as server:
        async with connected(server.url) as connection:
            await connection.send(late[:100_000])
            await asyncio.sleep(1)
            await connection.send(late[100_000:900_000])
            assert (await connection.answer()).status == 408


async def test_a_client_that_never_ends_is_cut_off(server, monkeypatch):
    monkeypatch.setattr("server.http.bodies.DISCARD_BYTES", 1_000_000)

    async def send_endlessly() -> None:
        while True:
            connection.writer.write(LARGE)
            await connection.writer.drain()

    async with connected(server.url) as connection:
        await connection.send(request(PATHS[0], LARGE, headers=JSON))
        with pytest.raises(ConnectionError):
            await send_endlessly()
