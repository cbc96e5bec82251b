"""A server without keys refuses pages of other sites and serves everybody else."""

import json
import socket
from collections.abc import Iterator

import pytest

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_http import status_of
from tests.server.test_refusals import error_of

BODY = json.dumps({"model": NAME, "prompt": "Once", "max_tokens": 1}).encode()
HOME = "https://app.example"
FORM = "application/x-www-form-urlencoded"
CROSS_SITE = {"sec-fetch-site": "cross-site"}
FOREIGN_PAGES = [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:3000"}, CROSS_SITE]


@pytest.fixture(scope="module")
def open_to_some(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model, allowed_hosts="llm.example,*.lan", cors_origins=HOME) as live:
        yield live


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.9.8.7", "[::2]:1"])
@pytest.mark.parametrize("path", ["/", "/livez", "/v1/models", "/metrics"])
def test_an_unknown_host_is_refused(server: LiveServer, host: str, path: str) -> None:
    refused = server.http.get(path, headers={"host": host})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "host_not_allowed")


def test_the_machines_names_and_allowed_hosts_are_accepted(server: LiveServer, open_to_some: LiveServer) -> None:
    own = [
        "localhost",
        "LOCALHOST:1",
        "localhost.",
        "a.localhost",
        "127.0.0.1",
        "127.8.8.8:80",
        "[::1]",
        "0.0.0.0:8000",
    ]
    for host in [*own, socket.gethostname(), socket.gethostname().upper()]:
        assert server.http.get("/v1/models", headers={"host": host}).status_code == 200, host
    for host in ("llm.example", "a.lan:8000", "localhost"):
        assert open_to_some.http.get("/v1/models", headers={"host": host}).status_code == 200
    for host in ("lan", "a.llm.example"):
        assert open_to_some.http.get("/v1/models", headers={"host": host}).status_code == 403


def test_the_host_of_an_absolute_target_is_checked(server: LiveServer) -> None:
    assert status_of(server, "GET", "http://localhost:8000/v1/models") == 200
    assert status_of(server, "GET", "HTTP://127.0.0.1") == 200
    assert status_of(server, "GET", "http://evil.example/v1/models") == 403


@pytest.mark.parametrize("headers", FOREIGN_PAGES)
def test_a_page_of_another_origin_is_refused(server: LiveServer, headers: dict[str, str]) -> None:
    for content_type in ("application/json", "text/plain", FORM):
        asked = {"content-type": content_type, **headers}
        refused = server.http.post("/v1/completions", content=BODY, headers=asked)
        assert (refused.status_code, error_of(refused)["code"]) == (403, "origin_not_allowed")
    assert server.http.get("/v1/models", headers=headers).status_code == 403
    preflight = headers | {"access-control-request-method": "POST"}
    assert server.http.options("/v1/completions", headers=preflight).status_code == 403


def test_pages_of_this_server_and_links_to_the_playground_work(server: LiveServer) -> None:
    own = {"origin": server.url, "sec-fetch-site": "same-origin", "content-type": "application/json"}
    assert server.http.post("/v1/completions", content=BODY, headers=own).status_code == 200
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert server.http.get("/", headers=followed).status_code == 200
    assert server.http.get("/v1/models", headers=followed).status_code == 403


def test_a_page_of_a_cors_origin_is_accepted(open_to_some: LiveServer) -> None:
    asked = {"origin": HOME, "sec-fetch-site": "cross-site", "content-type": "application/json"}
    assert open_to_some.http.post("/v1/completions", content=BODY, headers=asked).status_code == 200
    refused = open_to_some.http.post("/v1/completions", content=BODY, headers=asked | {"origin": "https://b.example"})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "origin_not_allowed")


def test_a_server_with_keys_accepts_any_host_and_origin(byte_model: LoadedModel) -> None:
    with live_server(byte_model, api_keys="sk-a") as live:
        headers = {"authorization": "Bearer sk-a", "host": "evil.example", "origin": "http://evil.example"}
        assert live.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "text/plain;charset=UTF-8", FORM, "multipart/form-data"])
def test_a_browser_must_send_a_json_content_type(server: LiveServer, content_type: str | None) -> None:
    for browser in ({"origin": server.url}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-mode": "no-cors"}):
        named = {"content-type": content_type} if content_type else {}
        refused = server.http.post("/v1/completions", content=BODY, headers=browser | named)
        assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_body")


@pytest.mark.parametrize("content_type", [None, FORM])
def test_curl_needs_no_json_content_type(server: LiveServer, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    assert server.http.post("/v1/completions", content=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, gzip"])
def test_an_encoded_body_is_refused(server: LiveServer, encoding: str) -> None:
    refused = server.http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_body")
    assert "content-encoding" in error_of(refused)["message"]
    assert server.complete(max_tokens=1).status_code == 200
    plain = {"content-encoding": "identity"}
    assert server.http.post("/v1/completions", content=BODY, headers=plain).status_code == 200
