from collections.abc import Iterator

import pytest

from nvium_core import LoadedModel
from server.http.protection import PROTECTIVE
from server.settings import Settings, SettingsError, read_settings
from tests.byte_model import NAME
from tests.server.http.test_keys import bearer
from tests.server.live_server import LiveServer, live_server
from tests.server.test_refusals import error_of

HOME = "https://app.example"


@pytest.fixture(scope="module")
def shared(byte_model: LoadedModel) -> Iterator[LiveServer]:
    options = {"api_keys": "sk-a", "cors_origins": f"{HOME},http://localhost:3000"}
    with live_server(byte_model, lambda app: app.get("/fail")(fail), **options) as live:
        yield live


async def fail() -> None:
    raise RuntimeError


def preflight(server: LiveServer, origin: str, method: str = "POST"):
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    return server.http.options("/v1/completions", headers=headers)


def test_a_preflight_from_an_allowed_origin_needs_no_key(shared: LiveServer) -> None:
    for origin in (HOME, "http://localhost:3000"):
        response = preflight(shared, origin)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
        assert response.headers["x-request-id"]


def test_a_page_of_an_allowed_origin_may_read_every_response_and_our_headers(shared: LiveServer) -> None:
    origin = {"origin": HOME}
    served = shared.http.post(
        "/v1/completions",
        json={"model": NAME, "prompt": "Once", "max_tokens": 1, "nope": 1},
        headers=origin | bearer("sk-a"),
    )
    failed = shared.http.get("/fail", headers=origin | bearer("sk-a"))
    refused = shared.http.get("/v1/models", headers=origin)
    assert [response.status_code for response in (served, failed, refused)] == [200, 500, 401]
    for response in (served, failed, refused):
        assert response.headers["access-control-allow-origin"] == HOME
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-nvium-ignored-params", "retry-after"} <= set(exposed)
        ours = {name for name in response.headers if name.startswith("x-")} - PROTECTIVE.keys()
        assert ours <= set(exposed)


@pytest.mark.parametrize(("origin", "method"), [("https://evil.example", "POST"), ("null", "POST"), (HOME, "DELETE")])
def test_another_origin_or_method_is_refused_in_the_error_form(shared: LiveServer, origin: str, method: str) -> None:
    response = preflight(shared, origin, method)
    assert response.status_code == 400
    assert "CORS" in error_of(response)["message"]
    assert "access-control-allow-origin" not in response.headers
    assert "Origin" in response.headers["vary"]


def test_a_page_of_another_origin_may_not_read_the_response(shared: LiveServer) -> None:
    response = shared.http.get("/v1/models", headers={"origin": "https://evil.example"} | bearer("sk-a"))
    assert "access-control-allow-origin" not in response.headers


def test_origins_are_off_by_default(server: LiveServer) -> None:
    assert preflight(server, HOME).status_code == 403
    response = server.http.get("/v1/models", headers={"origin": server.url})
    assert not any(name.startswith("access-control") for name in response.headers)


def test_preflights_are_not_counted_as_completions(shared: LiveServer) -> None:
    count = shared.service.metrics.requests.labels("completions", "completed")._value
    before = count.get()
    preflight(shared, HOME)
    assert count.get() == before


def test_origins_are_normalised_as_browsers_send_them() -> None:
    assert Settings(cors_origins="HTTPS://App.Example").cors_origins == (HOME,)
    assert Settings(cors_origins="*").cors_origins == ("*",)
    for wrong in ("app.example", HOME + "/", HOME + "/page", "", f"{HOME},", "null"):
        with pytest.raises(SettingsError, match=r"^cors_origins\.\d: must be an origin"):
            read_settings({"cors_origins": wrong})
