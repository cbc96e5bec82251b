import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import LoadedModel
from server.http.middleware import RequestFrame
from server.telemetry.metrics import Metrics
from tests.byte_model import NAME
from tests.server.http.test_keys import bearer
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_http import Reached, called, exchange

SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")
UNSAFE = [
    "a b",
    "x" * 129,
    "x" * 10_000,
    "é",
    "a\tb",
    "a\x1b[31mred",
    'a","outcome":"completed',
    "a\x00b",
    "a\x85b",
    "${jndi:ldap://x}",
    "../../etc/passwd",
    "",
]


async def fail() -> None:
    raise RuntimeError


@pytest.fixture(scope="module")
def busy(byte_model: LoadedModel) -> Iterator[LiveServer]:
    """A server with keys, CORS and a rate limit, so every middleware can refuse."""
    options = {"api_keys": "sk-a", "cors_origins": "https://a.example", "requests_per_minute": 1000}
    with live_server(byte_model, lambda app: app.get("/fail")(fail), **options) as live:
        yield live


def test_every_response_carries_the_requests_id(busy: LiveServer) -> None:
    key = bearer("sk-a")
    body = {"model": NAME, "prompt": "Once", "max_tokens": 2}
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked = [
        (200, "GET", "/livez", {}, None),
        (200, "GET", "/metrics", key, None),
        (200, "POST", "/v1/completions", key, body),
        (200, "POST", "/v1/completions", key, body | {"stream": True}),
        (200, "OPTIONS", "/v1/completions", preflight, None),
        (400, "OPTIONS", "/v1/completions", preflight | {"origin": "https://b.example"}, None),
        (400, "POST", "/v1/completions", key, body | {"max_tokens": -2}),
        (401, "POST", "/v1/completions", {}, body),
        (404, "GET", "/nope", key, None),
        (404, "POST", "/v1/completions", key, body | {"model": "other"}),
        (405, "PUT", "/livez", key, None),
        (413, "POST", "/v1/completions", key, body | {"prompt": "x" * 2_000_001}),
        (500, "GET", "/fail", key, None),
    ]
    for number, (status, method, path, headers, content) in enumerate(asked):
        response = busy.http.request(method, path, json=content, headers=headers | {"x-request-id": f"asked-{number}"})
        assert response.status_code == status, (method, path)
        assert response.headers.get_list("x-request-id") == [f"asked-{number}"]


def test_a_rate_limited_response_carries_the_requests_id(byte_model: LoadedModel) -> None:
    with live_server(byte_model, requests_per_minute=1) as server:
        for status in (200, 429):
            response = server.http.get("/v1/models", headers={"x-request-id": "mine"})
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_an_unsafe_id_is_replaced_in_headers_and_logs(server: LiveServer, unsafe: str) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n"
    with log_lines() as log:
        answer = exchange(server, f"{head}x-request-id: {unsafe}\r\n\r\n{{}}".encode("latin-1")).decode("latin-1")
        wait_until(lambda: bool(log.lines))
    if found := re.search(r"x-request-id: (.*)\r\n", answer):
        assert SAFE.fullmatch(found[1])
        assert found[1] != unsafe
        assert [line["request_id"] for line in log.lines if "request_id" in line] == [found[1]]
    else:
        assert "400 Bad Request" in answer
        assert [line["event"] for line in log.lines] == ["Invalid HTTP request received."]
    assert not unsafe or unsafe not in log.text


@given(st.text(st.characters(max_codepoint=255)), st.booleans())
async def test_an_id_is_kept_if_and_only_if_it_is_safe(sent: str, twice: bool) -> None:
    reached = Reached()
    frame = RequestFrame(reached, Metrics([1.0], [1.0]), {})
    headers = [("x-request-id", sent), ("x-request-id", "second")][: 2 if twice else 1]
    [start, _] = await called(frame, "GET", "/", headers)
    [received] = [value.decode() for name, value in start["headers"] if name == b"x-request-id"]
    assert SAFE.fullmatch(received)
    assert (received == sent) == bool(SAFE.fullmatch(sent))
    assert reached.states[0]["request_id"] == received


async def test_requests_without_an_id_get_different_ones() -> None:
    reached = Reached()
    frame = RequestFrame(reached, Metrics([1.0], [1.0]), {})
    for _ in range(3):
        await called(frame, "GET", "/")
    assert len({state["request_id"] for state in reached.states}) == 3
