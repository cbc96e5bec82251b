"""HTTP that is cheap to send and expensive to parse is refused early."""

import asyncio

import h11
import pytest

from nvium_core import LoadedModel
from server.http.parser import BYTES_PER_PIECE, FREE_PIECES, MAX_HEAD_BYTES, MAX_HEAD_LINES, BoundedParser
from server.http.protection import PROTECTIVE
from tests.server.generating import PATHS, asking
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import asked, connected, request
from tests.server.test_limits import error_of


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
async def test_a_head_that_is_too_large_is_refused(server: LiveServer, head: bytes) -> None:
    answer = await asked(server.url, head)
    assert (answer.status, error_of(answer)["code"]) == (431, "head_too_large")
    assert server.gauge('nvium_rejected_total{reason="head_too_large"}') > 0
    assert answer.headers["connection"] == "close"
    assert {name: answer.headers[name] for name in PROTECTIVE} == PROTECTIVE


async def test_a_head_just_below_the_limits_is_accepted(server: LiveServer) -> None:
    assert (await asked(server.url, get(*LINES[:-3]))).status == 200
    assert (await asked(server.url, get("x: " + "y" * (MAX_HEAD_BYTES - 100)))).status == 200


async def test_a_later_head_on_the_same_connection_is_bounded_too(server: LiveServer) -> None:
    async with connected(server.url) as connection:
        await connection.send(get() + get(*LINES))
        assert (await connection.answer()).status == 200
        assert (await connection.answer()).status == 431


async def test_a_long_body_does_not_count_as_part_of_the_head(server: LiveServer) -> None:
    body = asking(max_tokens=1, user="x" * MAX_HEAD_BYTES, prompt="\n" * MAX_HEAD_LINES)
    assert (await asked(server.url, body)).status == 200


@pytest.mark.parametrize(
    "head",
    [
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
async def test_a_request_that_a_proxy_may_parse_differently_is_refused(server: LiveServer, head: bytes) -> None:
    answer = await asked(server.url, head)
    assert (answer.status, error_of(answer)["code"]) == (400, "malformed_request")
    assert answer.headers["connection"] == "close"


async def test_a_refused_head_request_gets_no_body(server: LiveServer) -> None:
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


def test_a_body_may_have_only_some_small_chunks() -> None:
    assert fed([1] * FREE_PIECES).refusal is None
    assert fed([1] * (FREE_PIECES - 10) + [BYTES_PER_PIECE] * 5_000).refusal is None
    with pytest.raises(h11.RemoteProtocolError, match="too small"):
        fed([1] * (FREE_PIECES + 10))


async def test_excess_connections_are_refused_and_others_continue(byte_model: LoadedModel) -> None:
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
