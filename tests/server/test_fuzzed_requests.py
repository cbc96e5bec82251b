"""Nearly valid requests cause no internal error and do not affect other requests."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from nvium_core import LoadedModel
from tests.server.fuzz import ENDPOINTS, nearly_valid_requests
from tests.server.generating import asking
from tests.server.live_server import live_server
from tests.server.raw_client import Answer, asked, connected
from tests.server.test_refusals import error_of

NUM_REQUESTS = 10_000
NUM_CONNECTIONS = 8
ANSWERS = {200, 400, 404, 405, 415}

OTHER = asking(max_tokens=200, stream=True)


@pytest.mark.slow
async def test_ten_thousand_nearly_valid_requests_break_nothing(byte_model: LoadedModel) -> None:
    with live_server(byte_model, max_queue=4096, context=250, max_new_tokens=2_000) as server:
        alone = (await asked(server.url, OTHER)).spoken()
        requests = islice(nearly_valid_requests(seed=1), NUM_REQUESTS)
        fuzzing = [asyncio.create_task(answered(server.url, requests)) for _ in range(NUM_CONNECTIONS)]
        num_streams = 0
        while not all(task.done() for task in fuzzing):
            assert (await asked(server.url, OTHER)).spoken() == alone
            num_streams += 1
        statuses = sum((task.result() for task in fuzzing), start=Counter[int]())
        assert num_streams > 1
        assert statuses.total() == NUM_REQUESTS
        assert statuses.keys() <= ANSWERS
        assert statuses[200] > 0.1 * NUM_REQUESTS
        assert statuses[400] > 0.4 * NUM_REQUESTS
        assert server.service.admission.num_present == 0
        server.service.engine.check_idle()


async def answered(url: str, requests: Iterator[tuple[str, bytes]]) -> Counter[int]:
    """Check every answer and count the statuses."""
    statuses: Counter[int] = Counter()
    async with connected(url) as connection:
        for method, data in requests:
            try:
                answer = await connection.ask(data, method)
                check(method, answer)
            except Exception as error:
                error.add_note(f"{method} {data!r}"[:5_000])
                raise
            statuses[answer.status] += 1
    return statuses


def check(method: str, answer: Answer) -> None:
    assert answer.status in ANSWERS
    assert answer.headers["x-request-id"]
    if answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert not any("error" in event for event in answer.events())
    elif method == "HEAD":
        assert answer.body == b""
    elif answer.status == 200:
        answer.json()
    else:
        error_of(answer)
        assert len(answer.body) < 10_000


def test_the_same_seed_gives_the_same_requests() -> None:
    first, second = (list(islice(nearly_valid_requests(seed=5), 200)) for _ in range(2))
    assert first == second
    assert all(any(path.encode() in data for _, data in first) for path in ENDPOINTS)
