"""A server in its own process, as in a container, that has answered some requests."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.byte_model import NAME, save_byte_model
from tests.deploy.promql import Page
from tests.server.server_process import ServerProcess, server_process


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with server_process(save_byte_model(folder / NAME), folder) as process:
        assert complete(process, n=3).status_code == 200
        assert complete(process, model="other").status_code == 404
        yield process


@pytest.fixture(scope="session")
def page(server: ServerProcess) -> Page:
    return Page(server.http.get("/metrics").text)


def complete(server: ServerProcess, **body: Any) -> httpx.Response:
    asked = {"model": NAME, "prompt": "Once upon a time " * 20, "max_tokens": 20, "ignore_eos": True, **body}
    return server.http.post("/v1/completions", json=asked)
