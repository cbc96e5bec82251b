"""Thousands of requests leak no memory."""

import asyncio
import gc
import os
from random import Random

import pytest

from nvium_core import TokenStream
from nvium_core.engine.schedule.sequence import Sequence
from server.generation.choice import Choice
from server.generation.generation import Generation
from server.http.event_stream import EventStream
from server.telemetry.record import RequestRecord
from tests.server.http.test_hostile_clients import anonymous_mb
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import PATHS, asked, asking, connected

NUM_WARM = 500
NUM_REQUESTS = 2_000
NUM_CLIENTS = 8
MB_PER_REQUEST = 0.0095
"""More than the allocator's noise. The number of objects is checked separately."""

CACHE_TOKENS = 2_048
"""A cache so small that the warm-up touches all of it."""

OF_REQUESTS = (Sequence, TokenStream, Generation, Choice, RequestRecord, EventStream)


def some_request(random: Random) -> bytes:
    """Return a random request, which may be invalid."""
    path = random.choice(PATHS)
    fields = {"max_tokens": random.randrange(1, 6), "stream": random.random() < 0.5, "n": random.choice([1, 1, 2])}
    fields |= {"temperature": random.choice([0, 1, 3]), "seed": None}
    if path == "/v1/completions":
        fields |= {"logprobs": random.choice([None, None, 1]), "echo": random.random() < 0.2}
        fields["prompt"] = "".join(random.choices("abcdef ", k=random.randrange(1, 60)))
    return asking(path, **fields)


async def soak(url: str, num_requests: int, random: Random) -> None:
    """Send requests one after another. Disconnect from a tenth of them before the response."""
    for _ in range(num_requests):
        if random.random() < 0.1:
            async with connected(url) as connection:
                await connection.send(some_request(random))
        else:
            await asked(url, some_request(random))


async def soaked(server: LiveServer, num_requests: int, seed: int) -> tuple[float, int]:
    """Send requests, wait until all have ended, and return the process's memory in MB and its number of objects."""
    share = num_requests // NUM_CLIENTS
    await asyncio.gather(*(soak(server.url, share, Random(seed + number)) for number in range(NUM_CLIENTS)))
    wait_until(lambda: server.gauge("nvium_requests_running") == 0 and server.service.admission.num_present == 0)
    gc.collect()
    return anonymous_mb(os.getpid()), len(gc.get_objects())


def num_kept_for_requests() -> int:
    """Count the objects of requests, including those of earlier servers and of connections that are closing."""
    gc.collect()
    return sum(type(thing) in OF_REQUESTS for thing in gc.get_objects())


@pytest.mark.slow
async def test_thousands_of_requests_leak_no_memory(byte_model):
    with live_server(byte_model, cache_tokens=CACHE_TOKENS) as server:
        mb_before, objects_before = await soaked(server, NUM_WARM, seed=100)
        kept_before = num_kept_for_requests()
        mb_after, objects_after = await soaked(server, NUM_REQUESTS, seed=200)
        assert mb_after - mb_before < NUM_REQUESTS * MB_PER_REQUEST
        assert objects_after - objects_before < NUM_REQUESTS
        wait_until(lambda: num_kept_for_requests() < kept_before + 10)
        assert not server.service.worker._streams
        assert not server.service.worker._open_streams
        assert not server.service.engine.has_work
