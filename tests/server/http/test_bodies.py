"""HTTP and JSON that are cheap to send and expensive to parse are refused early."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.bodies import MAX_STARTS_PER_TURN, StartLimiter
from server.schemas.json_text import LIMITS, MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, count, without_strings
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import PATHS, asked, asking, connected, error_of, request


def get(*headers: str) -> bytes:
    return "\r\n".join(["GET /livez HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        get("no colon"),
        get("x: a\x00b"),
        request(PATHS[0]).replace(b"length: 0", b"length: -1"),
        request(PATHS[0]).replace(b"length: 0", b"length: " + b"9" * 5_000),
        request(PATHS[0], is_chunked=True).replace(b"chunked", b"gzip"),
        request(PATHS[0], b"{}", is_chunked=True).replace(b"\r\n2\r\n", b"\r\nxyz\r\n"),
    ],
)
async def test_malformed_http_is_refused(server, head):
    answer = await asked(server.url, head)
    assert (answer.status, answer.headers["connection"]) == (400, "close")


@pytest.mark.parametrize(("old", "new"), [(b"HTTP/1.1", b"HTTP/1.0"), (b"host:", b"content-length: 2\r\nhost:")])
async def test_requests_that_a_proxy_may_parse_differently_are_refused(server, old, new):
    answer = await asked(server.url, request(PATHS[0], b"{}", is_chunked=True).replace(old, new))
    assert (answer.status, error_of(answer)["code"]) == (400, "malformed_request")
    assert answer.headers["connection"] == "close"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(st.sampled_from('[]{}"\\/nu,:é\n ')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('[{"\\')), inner),
)


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(JSON)
def test_brackets_within_strings_are_not_counted(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert count([without_strings(text.encode())], LIMITS[0][0]) == containers(value)


async def test_a_body_of_many_parts_is_refused_but_not_one_of_many_brackets(server):
    refused = await asked(server.url, asking(**{f"x{number}": 1 for number in range(1_000)}))
    assert (refused.status, "at most 1000 fields" in str(error_of(refused)["message"])) == (400, True)
    for many in ([[]] * MAX_CONTAINERS, [1] * (MAX_VALUES + 1), {str(number): 1 for number in range(MAX_NAMES)}):
        refused = await asked(server.url, asking(x=many))
        assert (refused.status, error_of(refused)["code"]) == (400, "invalid_json")
        assert "more than" in error_of(refused)["message"]
    for text in ("[", ",", ":"):
        assert (await asked(server.url, asking(user=text * (MAX_VALUES + 1), max_tokens=1))).status == 200


async def test_escaped_quotes_do_not_hide_lists_in_any_encoding(server):
    text = json.dumps({"x": '"', "y": [[]] * (MAX_CONTAINERS + 1)})
    for encoding in ("utf-8", "utf-16", "utf-32-be", "utf-8-sig"):
        refused = await asked(server.url, request(PATHS[0], text.encode(encoding)))
        assert "lists and objects" in error_of(refused)["message"]


async def test_the_bodies_of_open_requests_are_bounded_in_total(byte_model):
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


async def passing(limiter: StartLimiter, number: int, begun: list[int]) -> None:
    await limiter.wait(0)
    begun.append(number)


async def test_few_requests_start_per_turn_and_in_order():
    limiter, begun, numbers = StartLimiter(), list[int](), [0]
    tasks = [asyncio.create_task(passing(limiter, number, begun)) for number in range(50)]
    while len(begun) < 50:
        await asyncio.sleep(0)
        numbers.append(len(begun))
    await asyncio.gather(*tasks)
    assert begun == sorted(begun)
    assert max(after - before for before, after in pairwise(numbers)) == MAX_STARTS_PER_TURN


async def test_a_single_request_does_not_wait():
    limiter, begun = StartLimiter(), list[int]()
    for number in range(50):
        task = asyncio.create_task(passing(limiter, number, begun))
        await asyncio.sleep(0)
        assert task.done()
        await asyncio.sleep(0)


async def test_a_cancelled_request_does_not_block_others():
    limiter, begun = StartLimiter(), list[int]()
    tasks = [asyncio.create_task(passing(limiter, number, begun)) for number in range(50)]
    await asyncio.sleep(0)
    for task in tasks[10:40]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [*range(10), *range(40, 50)]
    await passing(limiter, 50, begun)


async def test_only_costly_bodies_wait_for_costly_bodies():
    limiter = StartLimiter()
    costly = [asyncio.create_task(limiter.wait(0.05)) for _ in range(3)]
    await asyncio.sleep(0)
    await limiter.wait(0)
    assert not any(task.done() for task in costly)
    await costly[0]
    assert not costly[2].done()
    await asyncio.gather(*costly)
