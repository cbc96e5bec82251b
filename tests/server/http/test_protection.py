import pytest
from fastapi import FastAPI, Response

from nvium_core import LoadedModel
from server.http.protection import PROTECTIVE
from tests.server.generating import PATHS, asking
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_client import asked


@pytest.mark.parametrize("path", ["/livez", "/version", "/metrics", "/v1/models", "/nope"])
def test_every_response_has_the_security_headers(server: LiveServer, path: str) -> None:
    headers = server.http.get(path).headers
    assert {name: headers[name] for name in PROTECTIVE} == PROTECTIVE
    assert "server" not in headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_generated_responses_and_refusals_have_the_security_headers(
    server: LiveServer, path: str, stream: bool
) -> None:
    for data in (asking(path, stream=stream, max_tokens=1), asking(path, n=0), b"no HTTP\r\n\r\n"):
        answer = await asked(server.url, data)
        assert {name: answer.headers[name] for name in PROTECTIVE} == PROTECTIVE


def test_a_routes_own_headers_take_precedence(byte_model: LoadedModel) -> None:
    def add_page(app: FastAPI) -> None:
        @app.get("/page")
        async def page() -> Response:
            return Response("a", headers={"content-security-policy": "default-src 'self'"})

    with live_server(byte_model, add_page) as live:
        headers = live.http.get("/page").headers
        assert headers.get_list("content-security-policy") == ["default-src 'self'"]
        assert headers["x-content-type-options"] == "nosniff"
