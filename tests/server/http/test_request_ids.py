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

HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,128}")
HARMFUL = [
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
    """A server that refuses for every reason it has."""
    options = {"api_keys": "sk-a", "cors_origins": "https://a.example", "requests_per_minute": 1000}
    with live_server(byte_model, lambda app: app.get("/fail")(fail), **options) as live:
        yield live


def test_every_answer_carries_the_id_that_was_sent(busy: LiveServer) -> None:
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


def test_a_refusal_for_the_rate_carries_it_too(byte_model: LoadedModel) -> None:
    with live_server(byte_model, requests_per_minute=1) as server:
        for status in (200, 429):
            response = server.http.get("/v1/models", headers={"x-request-id": "mine"})
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


@pytest.mark.parametrize("harmful", HARMFUL)
def test_an_id_that_could_do_harm_is_replaced_in_headers_and_logs(server: LiveServer, harmful: str) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n"
    with log_lines() as log:
        answer = exchange(server, f"{head}x-request-id: {harmful}\r\n\r\n{{}}".encode("latin-1")).decode("latin-1")
        wait_until(lambda: bool(log.lines))
    if found := re.search(r"x-request-id: (.*)\r\n", answer):
        assert HARMLESS.fullmatch(found[1])
        assert found[1] != harmful
        assert [line["request_id"] for line in log.lines if "request_id" in line] == [found[1]]
    else:
        assert "400 Bad Request" in answer
        assert [line["event"] for line in log.lines] == ["Invalid HTTP request received."]
    assert not harmful or harmful not in log.text


def test_a_line_cannot_be_smuggled_into_the_headers(server: LiveServer) -> None:
    with log_lines() as log:
        head = "GET /nope HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: a\nx-forged: 1"
        answer = exchange(server, f"{head}\r\n\r\n".encode())
    assert b"x-forged" not in answer
    assert "forged" not in log.text


@given(st.text(st.characters(max_codepoint=255)), st.booleans())
async def test_an_id_is_kept_if_and_only_if_it_is_harmless(sent: str, twice: bool) -> None:
    reached = Reached()
    frame = RequestFrame(reached, Metrics([1.0], [1.0]), {})
    headers = [("x-request-id", sent), ("x-request-id", "second")][: 2 if twice else 1]
    [start, _] = await called(frame, "GET", "/", headers)
    [told] = [value.decode() for name, value in start["headers"] if name == b"x-request-id"]
    assert HARMLESS.fullmatch(told)
    assert (told == sent) == bool(HARMLESS.fullmatch(sent))
    assert reached.states[0]["request_id"] == told


async def test_requests_without_an_id_get_different_ones() -> None:
    reached = Reached()
    frame = RequestFrame(reached, Metrics([1.0], [1.0]), {})
    for _ in range(3):
        await called(frame, "GET", "/")
    assert len({state["request_id"] for state in reached.states}) == 3
