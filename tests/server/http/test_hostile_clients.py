"""Attacks on a server in its own process while another client streams.

The bounds are wide because the machine may be busy. The failures that they catch took many times longer, or gigabytes.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.http.attacks import ATTACKS, Attack, Neighbour, Target, anonymous_mb, sample_memory, tried
from tests.server.http.test_slow_clients import allow_open_files
from tests.server.live_server import wait_until
from tests.server.server_process import ServerProcess, server_process

SECONDS = 150
"""Timeout of an attack."""

SILENCE_SECONDS = 30

MAX_MB = 1_000
"""Allowed growth of memory. Tokenizing 1.9 MB takes half of it; 40 bodies of lists once took twice as much."""

KEYS = {"attacker": "sk-attacker", "neighbour": "sk-neighbour"}


@pytest.fixture(scope="module")
def target(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    allow_open_files(4_000)
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    options = {"api_keys": keys, "arrival_seconds": 8, "slow_client_seconds": 8}
    with server_process(model_folder, tmp_path_factory.mktemp("hostile"), **options) as server:
        yield server


def as_client(server: ServerProcess, name: str) -> Target:
    return Target(server.http.base_url.host, server.http.base_url.port or 80, KEYS[name])


async def attacked(server: ServerProcess, attack: Attack) -> tuple[set[int], float]:
    """Run an attack. Return the statuses, and the growth of the server's memory in MB."""
    peaks = [anonymous_mb(server.process.pid)]
    sampling = asyncio.create_task(sample_memory(server.process.pid, peaks))
    statuses = await tried(attack, as_client(server, "attacker"), SECONDS)
    sampling.cancel()
    return set(statuses), max(peaks) - peaks[0]


async def tokens_beyond(neighbour: Neighbour, num_tokens: int) -> None:
    await asyncio.to_thread(wait_until, lambda: len(neighbour.waits) > num_tokens + 10, seconds=SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_gets_fair_answers_and_another_stream_continues(target: ServerProcess, attack: Attack) -> None:
    neighbour, is_over = Neighbour(as_client(target, "neighbour"), max_tokens=4_000), threading.Event()
    streaming = asyncio.create_task(asyncio.to_thread(neighbour.run, is_over))
    try:
        await tokens_beyond(neighbour, 0)
        started = time.monotonic()
        statuses, grown_mb = await attacked(target, attack)
        await tokens_beyond(neighbour, len(neighbour.waits))
    finally:
        is_over.set()
        await streaming
    assert statuses <= attack.fair
    assert grown_mb < MAX_MB
    assert neighbour.num_failed == 0
    assert max(wait for end, wait in neighbour.waits if end > started) < SILENCE_SECONDS
    assert target.is_ready


async def test_an_attack_that_times_out_is_a_failure() -> None:
    async def hangs(_: Target) -> None:
        await asyncio.sleep(60)

    attack = Attack("hangs", frozenset({200}), hangs)  # type: ignore[arg-type]
    assert not set(await tried(attack, Target("127.0.0.1", 9), patience=0.1)) <= attack.fair
