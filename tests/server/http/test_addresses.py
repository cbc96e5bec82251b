"""Where a server is found: a Unix socket, a path behind a proxy; and HEAD wherever there is GET."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nvium_core import LoadedModel
from server.http.listener import listen_at, listening, port_of
from server.routes.openapi import ROUTES
from server.settings import Settings, SettingsError, read_settings
from tests.byte_model import NAME
from tests.server.live_server import LiveServer, live_server, wait_until


@pytest.fixture(scope="module")
def behind_proxy(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model, root_path="/llm/", api_keys="sk-a") as server:
        yield server


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.method == "get"])
def test_what_can_be_got_has_a_head(server: LiveServer, path: str) -> None:
    got, head = (
        server.http.request(method, path.format(model_id=NAME, response_id="resp_none")) for method in ("GET", "HEAD")
    )
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == got.headers["content-length"]


def test_what_can_only_be_posted_to_has_no_head(server: LiveServer) -> None:
    assert server.http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_leave_its_path_or_take_it_off(behind_proxy: LiveServer, prefix: str) -> None:
    assert behind_proxy.http.get(f"{prefix}/livez").status_code == 200
    assert behind_proxy.http.get(f"{prefix}/v1/models").status_code == 401
    key = {"x-api-key": "sk-a"}
    assert behind_proxy.http.get(f"{prefix}/v1/models", headers=key).status_code == 200
    document = behind_proxy.http.get(f"{prefix}/openapi.json", headers=key).json()
    assert document["servers"] == [{"url": "/llm"}]
    assert behind_proxy.http.get("/llmv1/models", headers=key).status_code == 404


@pytest.mark.parametrize("path", ["llm", "/a b", "/a//b", "/a?b", "/%2e"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=r"^root_path: must be a path"):
        read_settings({"root_path": path})


def test_a_unix_socket_is_listened_at_and_removed_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "nvium.sock"
    with listening(Settings(uds=path)) as listener:
        assert port_of(listener) == 0
        with pytest.raises(OSError, match=r"^cannot listen at .*/nvium\.sock: "):
            listen_at(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path, file = tmp_path / "nvium.sock", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listen_at(path).close()
    file.write_text("mine")
    with pytest.raises(OSError, match=r"^cannot listen at .*/file: "):
        listen_at(file)
    assert file.read_text() == "mine"


def test_a_server_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "nvium.sock"
    with socket.socket(socket.AF_UNIX) as hanging, socket.socket(socket.AF_UNIX) as waiting:
        hanging.bind(str(path))
        hanging.listen(0)
        waiting.connect(str(path))  # and fills its queue
        with pytest.raises(OSError, match=r"^cannot listen at .*/nvium\.sock: Address already in use"):
            listen_at(path)


def test_a_server_at_a_unix_socket_answers_and_stops(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "nvium_core.cli", "serve", str(model_folder), "--uds", str(path)]
    with (
        subprocess.Popen([*command, "--log-level", "warning"], stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://nvium", timeout=120) as http,
    ):
        try:
            wait_until(path.exists, seconds=120)
            wait_until(lambda: http.get("/readyz").status_code == 200, seconds=120)
            asked = {"model": "default", "prompt": "Once", "max_tokens": 3, "ignore_eos": True}
            assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 3
        finally:
            process.terminate()
        told = process.communicate(timeout=60)[1]
    assert (process.returncode, told) == (0, "")
    assert not path.exists()
