import asyncio
import json
import time
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nvium_core import LoadedModel
from server.http.bodies import MAX_CONTAINERS, MAX_STARTS_PER_TURN, Turnstile, num_containers, without_strings
from tests.server.generating import asking
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import asked, connected
from tests.server.test_refusals import error_of

JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(st.sampled_from('[]{}"\\/nu,:é\n ')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('[{"\\')), inner),
)


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(JSON)
def test_brackets_within_strings_are_not_counted(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert num_containers(without_strings(bytearray(text.encode()))) == containers(value)


def test_removing_strings_is_fast_for_any_body() -> None:
    for hostile in (b'"[' * 900_000, b'["a",' * 400_000, b'"' + b"\\" * 1_900_000, b'\\"' * 900_000):
        started = time.process_time()
        without_strings(bytearray(hostile))
        assert time.process_time() - started < 2


async def test_a_body_of_many_lists_is_refused_but_not_one_of_many_brackets(server: LiveServer) -> None:
    refused = await asked(server.url, asking(x=[[]] * MAX_CONTAINERS))
    assert (refused.status, error_of(refused)["code"]) == (400, "malformed_request")
    assert (await asked(server.url, asking(user="[" * (MAX_CONTAINERS + 1), max_tokens=1))).status == 200


async def test_an_object_of_many_fields_is_refused(server: LiveServer) -> None:
    refused = await asked(server.url, asking(**{f"x{number}": 1 for number in range(1_000)}))
    assert refused.status == 400
    assert "at most 1000 fields" in str(error_of(refused)["message"])


async def test_the_bodies_of_open_requests_are_bounded_in_total(byte_model: LoadedModel) -> None:
    with live_server(byte_model, max_body_bytes=60_000, max_present_bytes=100_000) as server:
        large = asking(max_tokens=4000, stream=True, user="x" * 50_000)
        async with connected(server.url) as first:
            await first.send(large)
            await first.head()
            refused = await asked(server.url, large)
            assert (refused.status, error_of(refused)["code"]) == (503, "bodies_too_large")
            assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
            assert (await asked(server.url, asking(max_tokens=1))).status == 200
        await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == 0)
        assert (await asked(server.url, large.replace(b"4000", b"   1"))).status == 200
        assert server.gauge('nvium_rejected_total{reason="bodies_too_large"}') == 1


async def passing(turnstile: Turnstile, number: int, begun: list[int]) -> None:
    await turnstile.pass_through(0)
    begun.append(number)


async def test_few_requests_start_per_turn_and_in_order() -> None:
    turnstile, begun, numbers = Turnstile(), list[int](), [0]
    tasks = [asyncio.create_task(passing(turnstile, number, begun)) for number in range(50)]
    while len(begun) < 50:
        await asyncio.sleep(0)
        numbers.append(len(begun))
    await asyncio.gather(*tasks)
    assert begun == sorted(begun)
    assert max(after - before for before, after in pairwise(numbers)) == MAX_STARTS_PER_TURN


async def test_a_single_request_does_not_wait() -> None:
    turnstile, begun = Turnstile(), list[int]()
    for number in range(50):
        task = asyncio.create_task(passing(turnstile, number, begun))
        await asyncio.sleep(0)
        assert task.done()
        await asyncio.sleep(0)


async def test_a_cancelled_request_does_not_block_others() -> None:
    turnstile, begun = Turnstile(), list[int]()
    tasks = [asyncio.create_task(passing(turnstile, number, begun)) for number in range(50)]
    await asyncio.sleep(0)
    for task in tasks[10:40]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [*range(10), *range(40, 50)]
    await passing(turnstile, 50, begun)


async def test_only_large_bodies_wait_for_large_bodies() -> None:
    turnstile = Turnstile()
    large = [asyncio.create_task(turnstile.pass_through(2_000_000)) for _ in range(3)]
    await asyncio.sleep(0)
    await turnstile.pass_through(1_000)
    assert not any(task.done() for task in large)
    await large[0]
    assert not large[2].done()
    await asyncio.gather(*large)
