import pytest
from fastapi import FastAPI, Response

from nvium_core import LoadedModel
from server.http.protection import PROTECTIVE
from tests.server.generating import PATHS, asking
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_client import asked


@pytest.mark.parametrize("path", ["/livez", "/version", "/metrics", "/v1/models", "/nope"])
def test_every_answer_is_nothing_but_what_it_is(server: LiveServer, path: str) -> None:
    headers = server.http.get(path).headers
    assert {name: headers[name] for name in PROTECTIVE} == PROTECTIVE
    assert "server" not in headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_so_are_generated_ones_and_those_that_are_no_http(server: LiveServer, path: str, stream: bool) -> None:
    for data in (asking(path, stream=stream, max_tokens=1), asking(path, n=0), b"no HTTP\r\n\r\n"):
        answer = await asked(server.url, data)
        assert {name: answer.headers[name] for name in PROTECTIVE} == PROTECTIVE


def test_what_a_route_says_of_itself_comes_first(byte_model: LoadedModel) -> None:
    def add_page(app: FastAPI) -> None:
        @app.get("/page")
        async def page() -> Response:
            return Response("a", headers={"content-security-policy": "default-src 'self'"})

    with live_server(byte_model, add_page) as live:
        headers = live.http.get("/page").headers
        assert headers.get_list("content-security-policy") == ["default-src 'self'"]
        assert headers["x-content-type-options"] == "nosniff"


def test_open_paths_tell_nothing_about_the_server(server: LiveServer) -> None:
    assert [server.http.get(path).json() for path in ("/livez", "/readyz", "/health")] == [{"status": "ok"}] * 3
    assert list(server.http.get("/version").json()) == ["version"]
