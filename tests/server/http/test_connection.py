from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from nvium_core import LoadedModel
from tests.server.generating import PATHS, asking
from tests.server.live_server import LiveServer, live_server
from tests.server.raw_client import Answer, asked


class WithoutExtensions:
    """Calls the app as a server without the fast path does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.pop("extensions", None)
        await self._app(scope, receive, send)


@pytest.fixture(scope="module")
def plain(byte_model: LoadedModel) -> Iterator[LiveServer]:
    def prepare(app: FastAPI) -> None:
        app.add_middleware(WithoutExtensions)

    with live_server(byte_model, prepare) as server:
        yield server


def framing(answer: Answer) -> dict[str, str | None]:
    return {name: answer.headers.get(name) for name in ("transfer-encoding", "connection", "content-length")}


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
@pytest.mark.parametrize("path", PATHS)
async def test_the_fast_path_does_not_change_the_response(
    server: LiveServer, plain: LiveServer, path: str, version: bytes
) -> None:
    request = asking(path, max_tokens=20, n=2, stream=True).replace(b"HTTP/1.1", version)
    fast, slow = await asked(server.url, request), await asked(plain.url, request)
    assert framing(fast) == framing(slow)
    assert framing(fast)["transfer-encoding"] == (None if version == b"HTTP/1.0" else "chunked")
    assert fast.spoken() == slow.spoken()
    assert len(fast.spoken()[1]) == 20
