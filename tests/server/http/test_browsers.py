"""What pages in browsers may do: hosts and origins, CORS, security headers."""

import json
import socket

import pytest
from fastapi import FastAPI, Response

from server.http.middleware import PROBES, PROTECTIVE
from server.settings import Settings, SettingsError, read_settings
from tests.byte_model import NAME, load_byte_model
from tests.server.http.test_keys import bearer
from tests.server.http.test_middleware import fail
from tests.server.live_server import LiveServer, live_server, server_fixture
from tests.server.raw_client import PATHS, asked, asking, error_of, request

BODY = json.dumps({"model": NAME, "prompt": "Once", "max_tokens": 1}).encode()
HOME = "https://app.example"
FORM = "application/x-www-form-urlencoded"
CROSS_SITE = {"sec-fetch-site": "cross-site"}
FOREIGN_PAGES = [{"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:3000"}, CROSS_SITE]


OPEN = {"allowed_hosts": "llm.example,*.lan", "cors_origins": HOME}
open_to_some = server_fixture(lambda: live_server(load_byte_model(), **OPEN))
SHARED = {"api_keys": "sk-a", "cors_origins": f"{HOME},http://localhost:3000"}
shared = server_fixture(lambda: live_server(load_byte_model(), lambda app: app.get("/fail")(fail), **SHARED))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.9.8.7", "[::2]:1"])
@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics"])
def test_an_unknown_host_is_refused_except_for_probes(server, host, path):
    refused = server.http.get(path, headers={"host": host})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "host_not_allowed")
    assert [server.http.get(probe, headers={"host": host}).status_code for probe in PROBES] == [200] * 3


def test_the_machines_names_and_allowed_hosts_are_accepted(server, open_to_some):
    own = ["localhost", "LOCALHOST:1", "localhost.", "a.localhost", "127.0.0.1", "127.8.8.8:80", "[::1]", "0.0.0.0"]
    for host in [*own, socket.gethostname(), socket.gethostname().upper()]:
        assert server.http.get("/v1/models", headers={"host": host}).status_code == 200, host
    for host in ("llm.example", "a.lan:8000", "localhost"):
        assert open_to_some.http.get("/v1/models", headers={"host": host}).status_code == 200
    for host in ("lan", "a.llm.example"):
        assert open_to_some.http.get("/v1/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("headers", FOREIGN_PAGES)
def test_a_page_of_another_origin_is_refused(server, headers):
    for content_type in ("application/json", "text/plain", FORM):
        refused = server.http.post("/v1/completions", content=BODY, headers={"content-type": content_type, **headers})
        assert (refused.status_code, error_of(refused)["code"]) == (403, "origin_not_allowed")
    assert server.http.get("/v1/models", headers=headers).status_code == 403
    preflight = headers | {"access-control-request-method": "POST"}
    assert server.http.options("/v1/completions", headers=preflight).status_code == 403


def test_pages_of_this_server_and_cors_origins_and_links_to_the_playground_work(server, open_to_some):
    home = {"origin": HOME, "sec-fetch-site": "cross-site", "content-type": "application/json"}
    assert open_to_some.http.post("/v1/completions", content=BODY, headers=home).status_code == 200
    refused = open_to_some.http.post("/v1/completions", content=BODY, headers=home | {"origin": "https://b.example"})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "origin_not_allowed")
    own = {"origin": server.url, "sec-fetch-site": "same-origin", "content-type": "application/json"}
    assert server.http.post("/v1/completions", content=BODY, headers=own).status_code == 200
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert server.http.get("/", headers=followed).status_code == 200
    assert server.http.get("/v1/models", headers=followed).status_code == 403


def test_a_server_with_keys_accepts_any_host_and_origin(byte_model):
    with live_server(byte_model, api_keys="sk-a") as live:
        headers = {"authorization": "Bearer sk-a", "host": "evil.example", "origin": "http://evil.example"}
        assert live.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "text/plain;charset=UTF-8", FORM, "multipart/form-data"])
def test_a_browser_must_send_a_json_content_type(server, content_type):
    for browser in ({"origin": server.url}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-mode": "no-cors"}):
        named = {"content-type": content_type} if content_type else {}
        refused = server.http.post("/v1/completions", content=BODY, headers=browser | named)
        assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_body")


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, gzip"])
def test_an_encoded_body_is_refused(server, encoding):
    refused = server.http.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_body")
    assert "content-encoding" in error_of(refused)["message"]
    assert server.complete(max_tokens=1).status_code == 200
    plain = {"content-encoding": "identity"}
    assert server.http.post("/v1/completions", content=BODY, headers=plain).status_code == 200


def preflight(server: LiveServer, origin: str, method: str = "POST"):
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
        "access-control-request-private-network": "true",
    }
    return server.http.options("/v1/completions", headers=headers)


def test_a_preflight_from_an_allowed_origin_needs_no_key_and_is_not_counted(shared):
    completed = shared.service.metrics.requests.labels("completions", "completed")._value
    before = completed.get()
    for origin in (HOME, "http://localhost:3000"):
        response = preflight(shared, origin)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
        assert response.headers["access-control-allow-private-network"] == "true"
        assert response.headers["x-request-id"]
    assert completed.get() == before


def test_a_page_of_an_allowed_origin_may_read_every_response_and_our_headers(shared):
    origin = {"origin": HOME}
    mine = origin | bearer("sk-a")
    served = shared.http.post("/v1/completions", json=json.loads(BODY) | {"nope": 1}, headers=mine)
    failed = shared.http.get("/fail", headers=mine)
    refused = shared.http.get("/v1/models", headers=origin)
    assert [response.status_code for response in (served, failed, refused)] == [200, 500, 401]
    for response in (served, failed, refused):
        assert response.headers["access-control-allow-origin"] == HOME
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-nvium-ignored-params", "retry-after"} <= set(exposed)
        ours = {name for name in response.headers if name.startswith("x-")} - PROTECTIVE.keys()
        assert ours <= set(exposed)


@pytest.mark.parametrize(("origin", "method"), [("https://evil.example", "POST"), ("null", "POST"), (HOME, "PATCH")])
def test_another_origin_or_method_is_refused_in_the_error_form(shared, origin, method):
    response = preflight(shared, origin, method)
    assert response.status_code == 400
    assert "CORS" in error_of(response)["message"]
    assert not {"access-control-allow-origin", "access-control-allow-private-network"} & response.headers.keys()
    assert "Origin" in response.headers["vary"]
    response = shared.http.get("/v1/models", headers={"origin": "https://evil.example"} | bearer("sk-a"))
    assert "access-control-allow-origin" not in response.headers


def test_a_server_without_cors_sends_none_of_its_headers(server):
    assert preflight(server, HOME).status_code == 403
    response = server.http.get("/v1/models", headers={"origin": server.url})
    assert not any(name.startswith("access-control") for name in response.headers)


def test_origins_are_normalised_as_browsers_send_them():
    assert Settings(cors_origins="HTTPS://App.Example").cors_origins == (HOME,)
    assert Settings(cors_origins="*").cors_origins == ("*",)
    for wrong in ("app.example", HOME + "/", HOME + "/page", "", f"{HOME},", "null"):
        with pytest.raises(SettingsError, match=r"^cors_origins, entry \d: must be an origin"):
            read_settings({"cors_origins": wrong})


async def test_every_response_has_the_security_headers(server):
    read = [request(path, method="GET") for path in ("/livez", "/version", "/metrics", "/v1/models", "/nope")]
    generated = [asking(path, stream=stream, max_tokens=1) for path in PATHS for stream in (True, False)]
    refused = [asking(path, n=0) for path in PATHS]
    for data in (*read, *generated, *refused):
        headers = (await asked(server.url, data)).headers
        assert {name: headers[name] for name in PROTECTIVE} == PROTECTIVE, data
        assert "server" not in headers


def test_a_routes_own_headers_take_precedence(byte_model):
    def add_page(app: FastAPI) -> None:
        @app.get("/page")
        async def page() -> Response:
            return Response("a", headers={"content-security-policy": "default-src 'self'"})

    with live_server(byte_model, add_page) as live:
        headers = live.http.get("/page").headers
        assert headers.get_list("content-security-policy") == ["default-src 'self'"]
        assert headers["x-content-type-options"] == "nosniff"
