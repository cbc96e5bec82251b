import asyncio
import random
from pathlib import Path

import pytest

from tests.faults.cluster import cluster
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


async def all_at_once(url: str, expected: dict[Known, Spoken], chance: random.Random) -> list[str]:
    """Send the requests in random order, three at a time and half of them streamed. Return the outcomes."""
    order, turns = random.Random(chance.random()).sample(KNOWN, len(KNOWN)), asyncio.Semaphore(3)

    async def ask(known: Known, *, stream: bool) -> str:
        async with turns, connected(url) as connection:
            return judged(await connection.ask(known.data(stream=stream)), expected[known])

    return await asyncio.gather(*(ask(known, stream=chance.random() < 0.5) for known in order))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
async def test_tokens_do_not_depend_on_the_number_of_replicas_and_the_order(model_folder, tmp_path, expected, replicas):
    with cluster(model_folder, tmp_path / "log", replicas=replicas, **OPTIONS) as server:
        assert set(await all_at_once(server.url, expected, random.Random(replicas))) == {"right"}
