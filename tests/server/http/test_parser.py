"""HTTP and JSON that are cheap to send and expensive to parse are refused early."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.bodies import MAX_STARTS_PER_TURN, StartLimiter
from server.http.middleware import PROTECTIVE
from server.http.parser import BYTES_PER_PIECE, FREE_PIECES, MAX_HEAD_BYTES, MAX_HEAD_LINES, BoundedParser
from server.schemas.json_text import LIMITS, MAX_CONTAINERS, MAX_NAMES, MAX_VALUES, count, without_strings
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import PATHS, asked, asking, connected, error_of, request


def get(*headers: str) -> bytes:
    return "\r\n".join(["GET /livez HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


LINES = [f"x-{number}: y" for number in range(MAX_HEAD_LINES)]


@pytest.mark.parametrize(
    "head",
    [
        get(*LINES),
        get("x: " + "y" * MAX_HEAD_BYTES),
        get(*LINES).removesuffix(b"\r\n\r\n"),
        get(*LINES).replace(b"\r\n", b"\n"),
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_refused(server, head):
    answer = await asked(server.url, head)
    assert (answer.status, error_of(answer)["code"]) == (431, "head_too_large")
    assert server.gauge('nvium_rejected_total{reason="head_too_large"}') > 0
    assert answer.headers["connection"] == "close"
    assert {name: answer.headers[name] for name in PROTECTIVE} == PROTECTIVE


async def test_a_head_just_below_the_limits_is_accepted_whatever_its_body(server):
    body = asking(max_tokens=1, user="x" * MAX_HEAD_BYTES, prompt="\n" * MAX_HEAD_LINES)
    assert (await asked(server.url, body)).status == 200
    assert (await asked(server.url, get(*LINES[:-3]))).status == 200
    assert (await asked(server.url, get("x: " + "y" * (MAX_HEAD_BYTES - 100)))).status == 200


async def test_a_later_head_on_the_same_connection_is_bounded_too(server):
    async with connected(server.url) as connection:
        await connection.send(get() + get(*LINES))
        assert (await connection.answer()).status == 200
        assert (await connection.answer()).status == 431


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
        get().replace(b"HTTP/1.1", b"HTTP/9.9"),
        get().replace(b"HTTP/1.1", b"HTTP/2.0"),
        get("x: one", " two"),
        get("x: one", "\ttwo"),
        get("x: one").replace(b"\r\n", b"\n"),
        get("x: one").replace(b"one\r\n", b"one\n"),
        request(PATHS[0], b"{}", is_chunked=True).replace(b"HTTP/1.1", b"HTTP/1.0"),
        request(PATHS[0], b"{}", is_chunked=True).replace(b"host:", b"content-length: 2\r\nhost:"),
    ],
)
async def test_malformed_http_and_requests_that_a_proxy_may_parse_differently_are_refused(server, head):
    answer = await asked(server.url, head)
    assert (answer.status, error_of(answer)["code"]) == (400, "malformed_request")
    assert answer.headers["connection"] == "close"


async def test_a_refused_head_request_gets_no_body(server):
    wrong = get().replace(b"HTTP/1.1", b"HTTP/9.9")
    answer = await asked(server.url, wrong.replace(b"GET", b"HEAD"), method="HEAD")
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    async with connected(server.url) as connection:
        await connection.ask(get().replace(b"GET", b"HEAD"), method="HEAD")
        later = await connection.ask(wrong)
    assert (later.status, error_of(later)["code"]) == (400, "malformed_request")


def fed(sizes: list[int]) -> BoundedParser:
    """Parse a chunked body with chunks of these sizes."""
    parser = BoundedParser(h11.SERVER, MAX_HEAD_BYTES)
    parser.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    for size in sizes:
        parser.receive_data(b"%x\r\n%b\r\n" % (size, b" " * size))
        assert isinstance(parser.next_event(), h11.Data)
    return parser


def test_a_body_may_have_only_some_small_chunks():
    assert fed([1] * FREE_PIECES).refusal is None
    assert fed([1] * (FREE_PIECES - 10) + [BYTES_PER_PIECE] * 5_000).refusal is None
    with pytest.raises(h11.RemoteProtocolError, match="too small"):
        fed([1] * (FREE_PIECES + 10))


async def test_excess_connections_are_refused_and_others_continue(byte_model):
    with live_server(byte_model, max_connections=3) as server:
        async with connected(server.url) as first, connected(server.url), connected(server.url):
            assert (await first.ask(asking(max_tokens=1))).status == 200
            async with connected(server.url) as fourth:
                answer = await fourth.answer()
                assert (answer.status, error_of(answer)["code"]) == (503, "too_many_connections")
                refused = server.app.state.service.metrics.rejected.labels("too_many_connections")
                assert refused._value.get() == 1
                assert answer.headers["retry-after"] == "1"
            assert (await first.ask(asking(max_tokens=1))).status == 200
        await asyncio.to_thread(wait_until, lambda: server.http.get("/livez").status_code == 200)


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
