import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest

from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import PATHS, RawConnection, asked, asking, connected

NUM_CLIENTS = 200
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

CANCELLED = (
    'nvium_requests_total{endpoint="completions",outcome="cancelled"}',
    'nvium_finished_choices_total{finish_reason="abort"}',
)

Moment = Callable[[RawConnection, bytes, Random], Awaitable[None]]
Way = Callable[[RawConnection], Awaitable[None]]


async def during_the_request(connection: RawConnection, data: bytes, random: Random) -> None:
    await connection.send(data[: random.randrange(len(data))])


async def after_a_while(connection: RawConnection, data: bytes, random: Random) -> None:
    await connection.send(data)
    await asyncio.sleep(random.choice([0, random.random()]))


async def during_the_response(connection: RawConnection, data: bytes, random: Random) -> None:
    await connection.send(data)
    with suppress(TimeoutError):
        async with asyncio.timeout(random.random()):
            while await connection.reader.read(random.randrange(1, 2_000)):
                pass


MOMENTS: list[Moment] = [during_the_request, after_a_while, during_the_response]


async def by_closing(connection: RawConnection) -> None:
    connection.writer.close()


async def by_half(connection: RawConnection) -> None:
    """Close only the sending side and keep reading."""
    connection.writer.write_eof()
    while await connection.reader.read(100_000):
        pass


async def by_a_reset(connection: RawConnection) -> None:
    raw: socket.socket = connection.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    connection.writer.transport.abort()


async def during_a_pipelined_request(connection: RawConnection) -> None:
    await connection.send(asking()[:-10])
    await asyncio.sleep(0.05)
    connection.writer.close()


WAYS: list[Way] = [by_closing, by_half, by_a_reset, during_a_pipelined_request]


async def come_and_go(url: str, random: Random) -> None:
    await asyncio.sleep(random.random())
    with suppress(ConnectionError):
        async with connected(url) as connection:
            n, stream = random.randrange(1, 4), random.random() < 0.5
            data = asking(random.choice(PATHS), max_tokens=4000, n=n, stream=stream)
            await random.choice(MOMENTS)(connection, data, random)
            await random.choice(WAYS)(connection)


def is_empty(server: LiveServer) -> bool:
    gauges = ("nvium_requests_running", "nvium_requests_waiting", "nvium_deferred_rows", "nvium_kv_cache_usage_ratio")
    return server.service.admission.num_present == 0 and not any(map(server.gauge, gauges))


@pytest.mark.slow
async def test_clients_that_disconnect_at_random_leak_nothing(byte_model):
    question = asking(max_tokens=50)
    with live_server(byte_model, max_sequences=16) as server:
        before = (await asked(server.url, question)).spoken()
        await asyncio.gather(*(come_and_go(server.url, Random(number)) for number in range(NUM_CLIENTS)))
        wait_until(lambda: is_empty(server))
        server.service.engine.check_idle()
        server.service.engine.check_integrity()
        assert (await asked(server.url, question)).spoken() == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_aborts_the_choices_of_the_request(server, way, stream):
    before = [server.gauge(name) for name in CANCELLED]
    async with connected(server.url) as connection:
        await connection.send(asking(max_tokens=4000, stream=stream, n=2))
        wait_until(lambda: server.gauge("nvium_requests_running") == 2)
        await way(connection)
    wait_until(lambda: is_empty(server) and server.gauge(CANCELLED[1]) >= before[1] + 2)
    wait_until(lambda: server.gauge(CANCELLED[0]) > before[0])
    assert [server.gauge(name) for name in CANCELLED] == [before[0] + 1, before[1] + 2]
