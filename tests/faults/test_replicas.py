import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, cluster, gateway_of
from tests.faults.load import OPTIONS, Known, Spoken, judged, known_requests, quiet_answers
from tests.server.forked_server import forked_server
from tests.server.raw_client import connected

NUM_KNOWN = 10
KNOWN = known_requests(NUM_KNOWN, random.Random(3))


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Known, Spoken]:
    """The tokens of a single server without a gateway, one request at a time."""
    with forked_server(model_folder, tmp_path_factory.mktemp("alone") / "log", **OPTIONS) as server:
        return asyncio.run(quiet_answers(server.url, KNOWN))


@pytest.fixture(scope="module")
def three(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(model_folder, tmp_path_factory.mktemp("three") / "log", num_replicas=3, **OPTIONS) as server:
        yield server


async def all_at_once(url: str, expected: dict[Known, Spoken], chance: random.Random) -> list[str]:
    """Send the requests in random order, three at a time and half of them streamed. Return the outcomes."""
    order, turns = random.Random(chance.random()).sample(KNOWN, len(KNOWN)), asyncio.Semaphore(3)

    async def ask(known: Known, *, stream: bool) -> str:
        async with turns, connected(url) as connection:
            return judged(await connection.ask(known.data(stream=stream)), expected[known])

    return await asyncio.gather(*(ask(known, stream=chance.random() < 0.5) for known in order))


@pytest.mark.slow
async def test_tokens_do_not_depend_on_the_number_of_replicas_and_the_order(three, model_folder, tmp_path, expected):
    with ExitStack() as stack:
        for number in (1, 2):
            log = tmp_path / f"log-{number}"
            gateway = stack.enter_context(gateway_of(model_folder, log, three.replicas[:number], **OPTIONS))
            assert set(await all_at_once(gateway.url, expected, random.Random(number))) == {"right"}
    assert set(await all_at_once(three.url, expected, random.Random(3))) == {"right"}
