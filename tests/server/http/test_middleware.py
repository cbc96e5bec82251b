"""Request ids, path prefixes behind a proxy, HEAD requests and cancelled ones."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount

from server.admission import Loading
from server.http.middleware import LastResort, RequestContext
from server.routes.openapi import document
from server.settings import SettingsError, read_settings
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord
from tests.byte_model import NAME
from tests.server.http.test_keys import Reached, bearer, called
from tests.server.live_server import live_server

SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")


async def fail() -> None:
    raise RuntimeError


def test_every_response_carries_the_requests_id(byte_model):
    """Keys, CORS and a rate limit are on, so every middleware can refuse."""
    options = {"api_keys": "sk-a", "cors_origins": "https://a.example", "requests_per_minute": 1000}
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
    with live_server(byte_model, lambda app: app.get("/fail")(fail), **options) as server:
        for number, (status, method, path, headers, content) in enumerate(asked):
            named = headers | {"x-request-id": f"asked-{number}"}
            response = server.http.request(method, path, json=content, headers=named)
            assert response.status_code == status, (method, path)
            assert response.headers.get_list("x-request-id") == [f"asked-{number}"]


@given(st.text(st.characters(max_codepoint=255)), st.booleans())
async def test_an_id_is_kept_if_and_only_if_it_is_safe(sent, twice):
    reached = Reached()
    frame = RequestContext(reached, Metrics([1.0]), {})
    headers = [("x-request-id", sent), ("x-request-id", "second")][: 2 if twice else 1]
    [start, _] = await called(frame, "GET", "/", headers)
    [received] = [value.decode() for name, value in start["headers"] if name == b"x-request-id"]
    assert SAFE.fullmatch(received)
    assert (received == sent) == bool(SAFE.fullmatch(sent))
    assert reached.states[0]["record"].request_id == received


def test_head_works_wherever_get_does_and_only_there(server):
    assert server.http.head("/v1/completions").status_code == 405
    for path in (path for path, methods in document()["paths"].items() if "get" in methods):
        url = path.format(model_id=NAME, response_id="resp_none")
        got, head = server.http.get(url), server.http.head(url)
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        if path != "/metrics":
            assert head.headers["content-length"] == got.headers["content-length"]


def test_a_proxy_may_keep_or_remove_its_prefix(byte_model):
    key = {"x-api-key": "sk-a"}
    with live_server(byte_model, root_path="/llm/", api_keys="sk-a") as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/livez").status_code == 200
            assert server.http.get(f"{prefix}/v1/models").status_code == 401
            assert server.http.get(f"{prefix}/v1/models", headers=key).status_code == 200
            assert server.http.get(f"{prefix}/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]
        assert server.http.get("/llmv1/models", headers=key).status_code == 404
        assert server.http.get("/llm").headers["location"] == "/llm/"


@pytest.mark.parametrize("path", ["llm", "/a b", "/a//b", "/a?b", "/%2e"])
def test_an_invalid_root_path_is_refused(path):
    with pytest.raises(SettingsError, match=r"^root_path: must be a path"):
        read_settings({"root_path": path})


async def begin_and_cancel(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise asyncio.CancelledError


@pytest.mark.parametrize(("is_draining", "outcome"), [(False, "cancelled"), (True, "failed")])
async def test_a_request_cancelled_by_another_server_counts_as_left_by_its_client(is_draining, outcome):
    app = Starlette(routes=[Mount("/", begin_and_cancel)], middleware=[Middleware(LastResort)])
    app.state.service = Loading(read_settings({"model": "unused"}))
    app.state.service.admission.is_draining = is_draining
    record = RequestRecord(Metrics([1.0]), request_id="mine")
    record.status = 200
    await called(app, "GET", "/", record=record)
    assert record.outcome == outcome
