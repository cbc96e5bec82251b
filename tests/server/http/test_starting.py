"""While the model loads, the process is live, not ready, and says to everyone else when to come back."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvium_core import LoadedModel
from server import app
from server.app import run
from server.http.listener import listen
from server.http.starting import answered_while_starting
from server.settings import Settings
from tests.server.forked_server import forked_server
from tests.server.live_server import wait_until

LOADS_FOR = 1.0


def test_probes_are_answered_and_everything_else_is_told_to_come_back() -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, answered_while_starting(listener, None), httpx.Client(base_url=url, timeout=30) as http:
        assert http.get("/livez").json() == {"status": "ok"}
        for path in ("/readyz", "/health", "/v1/models", "/metrics", "/"):
            check_not_ready(http.get(path))
        check_not_ready(http.post("/v1/completions", json={"prompt": "Once"}))


def check_not_ready(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert int(response.headers["retry-after"]) > 0
    assert response.headers["connection"] == "close"


def test_afterwards_the_socket_is_free_for_the_server_and_no_thread_is_left() -> None:
    with listen("127.0.0.1", 0) as listener:
        with answered_while_starting(listener, None):
            pass
        assert "nvium-starting" not in {thread.name for thread in threading.enumerate()}
        with answered_while_starting(listener, None):
            assert httpx.get(f"http://127.0.0.1:{listener.getsockname()[1]}/livez").status_code == 200


def slow_to_load() -> None:
    """In the server's process: its model takes a moment more."""
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
