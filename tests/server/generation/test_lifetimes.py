"""The end of requests: a closed connection, a stopped engine, a draining server."""

import json
import threading
from pathlib import Path

import httpx
import pytest

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.generating import asking
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import connected
from tests.server.server_process import server_process

LONG = {"model": NAME, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "seed": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_connection_is_counted_as_cancelled(server: LiveServer, stream: bool) -> None:
    names = [
        'nvium_requests_total{endpoint="completions",outcome="cancelled"}',
        'nvium_finished_choices_total{finish_reason="abort"}',
    ]
    before = [server.gauge(name) for name in names]
    async with connected(server.url) as connection:
        await connection.send(asking(max_tokens=4000, stream=stream, n=3))
        wait_until(lambda: server.gauge("nvium_requests_running") == 3)
    wait_until(lambda: server.gauge("nvium_requests_running") == 0)
    assert [server.gauge(name) - old for name, old in zip(names, before, strict=True)] == [1, 3]


def test_a_failed_stream_ends_with_an_error_event_and_done(byte_model: LoadedModel) -> None:
    with (
        live_server(byte_model) as server,
        server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.service.worker.stop()
        *_, error, _, done, _ = lines
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        assert done == "data: [DONE]"
        assert server.http.get("/livez").status_code == 503
        assert server.http.get("/readyz").status_code == 503
        refusal = server.complete(max_tokens=1)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "engine_stopped")


def test_a_whole_response_fails_with_503_if_the_engine_stops(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server:
        responses: list[httpx.Response] = []
        request = threading.Thread(target=lambda: responses.append(server.http.post("/v1/completions", json=LONG)))
        request.start()
        wait_until(lambda: server.service.worker.state.num_running == 1)
        server.service.worker.stop()
        request.join()
        assert (responses[0].status_code, responses[0].json()["error"]["code"]) == (503, "engine_stopped")
        assert int(responses[0].headers["retry-after"]) > 0


@pytest.mark.slow
def test_a_draining_server_is_live_but_not_ready(model_folder: Path, tmp_path: Path) -> None:
    with server_process(model_folder, tmp_path) as server:
        body = LONG | {"max_tokens": 300, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            wait_until(lambda: not server.is_ready)
            assert server.http.get("/readyz").json()["error"]["code"] == "not_ready"
            assert server.http.get("/livez").status_code == 200
            *_, done, _ = lines
        assert done == "data: [DONE]"
        assert server.exit_code(seconds=10) == 0
