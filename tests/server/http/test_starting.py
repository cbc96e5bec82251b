"""While the model loads, the server is live but not ready, and answers other requests with 503."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvium_core import LoadedModel
from server import app
from server.app import run
from server.http.listener import listen
from server.http.starting import starting_server
from server.settings import Settings
from tests.server.forked_server import forked_server
from tests.server.live_server import wait_until
from tests.server.server_process import free_port

LOADS_FOR = 1.0
MAX_LOG_BYTES = 20_000
KEYS = ("sk-old", "sk-new")


def test_only_livez_succeeds_while_the_model_loads() -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        listener,
        starting_server(listener, Settings()),
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        assert http.get("/livez").json() == {"status": "ok"}
        for path in ("/readyz", "/health", "/v1/models", "/metrics", "/"):
            check_not_ready(http.get(path))
        check_not_ready(http.post("/v1/completions", json={"prompt": "Once"}))


def test_malformed_http_is_refused_in_the_error_form() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        starting_server(listener, Settings()),
        socket.create_connection(listener.getsockname(), timeout=30) as client,
    ):
        client.sendall(b"\x00 no HTTP\r\n\r\n")
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "malformed_request"


def check_not_ready(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert int(response.headers["retry-after"]) > 0
    assert response.headers["connection"] == "close"


def test_the_starting_server_leaves_the_socket_open_and_no_thread() -> None:
    with listen("127.0.0.1", 0) as listener:
        with starting_server(listener, Settings()):
            pass
        assert "nvium-starting" not in {thread.name for thread in threading.enumerate()}
        with starting_server(listener, Settings()):
            assert httpx.get(f"http://127.0.0.1:{listener.getsockname()[1]}/livez").status_code == 200


def with_few_files() -> None:
    """Limit the descriptors and load the model slowly."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    slow_to_load()


@pytest.mark.slow
def test_silent_clients_do_not_stop_the_model_from_loading(model_folder: Path, tmp_path: Path) -> None:
    with (
        forked_server(model_folder, tmp_path / "log", prepare=with_few_files, waits=False) as server,
        ExitStack() as stack,
    ):
        address = (server.http.base_url.host, server.http.base_url.port)
        wait_until(lambda: answers(server.http, "/livez"), seconds=60)
        for _ in range(150):
            stack.enter_context(socket.create_connection(address, timeout=5))
        assert [httpx.get(f"{server.url}/livez", timeout=10).status_code for _ in range(5)] == [200] * 5
        stack.close()
        wait_until(lambda: answers(server.http, "/readyz"), seconds=60)
        assert len(server.log()) < MAX_LOG_BYTES


@pytest.mark.slow
def test_keys_can_be_reloaded_while_the_model_loads(model_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-old")
    with forked_server(model_folder, tmp_path / "log", prepare=slow_to_load, waits=False, api_keys_file=keys) as server:
        wait_until(lambda: answers(server.http, "/livez"), seconds=60)
        keys.write_text("bob:sk-new")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: answers(server.http, "/readyz"), seconds=60)
        statuses = [server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}) for key in KEYS]
    assert [each.status_code for each in statuses] == [401, 200]


AS_PID_1 = 'trap "" TERM; exec "$0" -m nvium_core.cli serve "$1" --port "$2"'
"""Start with SIGTERM ignored, as the first process of a container does."""


@pytest.mark.slow
def test_sigterm_ends_a_server_while_it_loads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # nobody writes it
    port = free_port()
    server = subprocess.Popen(["sh", "-c", AS_PID_1, sys.executable, tmp_path, str(port)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            wait_until(lambda: answers(http, "/livez"), seconds=120)
        server.terminate()
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.wait()


def answers(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path).status_code == 200
    except httpx.TransportError:
        return False


def slow_to_load() -> None:
    """Delay the loading of the model in the server's process."""
    load_mapped = app.load_mapped

    def slowly(*given: Any, **more: Any) -> LoadedModel:
        threading.Event().wait(LOADS_FOR)
        return load_mapped(*given, **more)

    app.load_mapped = slowly


def test_a_server_that_loads_becomes_ready_on_the_same_address(model_folder: Path, tmp_path: Path) -> None:
    with forked_server(model_folder, tmp_path / "log", prepare=slow_to_load, waits=False) as server:
        statuses = list[int]()

        def looks_ready() -> bool:
            try:
                statuses.append(server.http.get("/readyz").status_code)
            except httpx.TransportError:
                return False
            return statuses[-1] == 200

        wait_until(looks_ready, seconds=120)
        assert set(statuses) == {200, 503}
        assert server.http.get("/livez").status_code == 200
        assert server.http.get("/v1/models").json()["data"]


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model folder"):
        run(Settings(model=str(tmp_path / "none"), port=0))
