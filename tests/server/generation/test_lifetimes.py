"""Sequences end with their connection, with a failed engine, or with the drain after SIGTERM."""

import json
import socket
import threading
from pathlib import Path

import httpx
import pytest

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.server_process import server_process

LONG = {"model": NAME, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "seed": 1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_closed_connection_frees_its_sequences_within_a_second(server: LiveServer, stream: bool, n: int) -> None:
    body = json.dumps(LONG | {"stream": stream, "n": n}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    url = httpx.URL(server.url)
    cancelled = 'nvium_requests_total{endpoint="completions",outcome="cancelled"}'
    aborted = 'nvium_finished_choices_total{finish_reason="abort"}'
    before, before_aborted = server.gauge(cancelled), server.gauge(aborted)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        wait_until(lambda: server.gauge("nvium_requests_running") == n)
    assert wait_until(lambda: server.gauge("nvium_requests_running") == 0) < 1
    assert server.service.admission.num_present == 0
    assert server.gauge("nvium_kv_cache_usage_ratio") == 0
    assert server.gauge(cancelled) == before + 1
    assert server.gauge(aborted) == before_aborted + n


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
def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(model_folder: Path, tmp_path: Path) -> None:
    with server_process(model_folder, tmp_path) as server:
        http = server.http
        body = LONG | {"max_tokens": 300, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            wait_until(lambda: not server.is_ready)
            assert http.get("/readyz").json()["error"]["code"] == "not_ready"
            assert http.get("/livez").status_code == 200
            refused = http.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            *_, last, _, done, _ = lines
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.exit_code(seconds=10) == 0
    log = server.log()
    assert '"outcome": "completed"' in log
    assert "Once" not in log


@pytest.mark.slow
def test_requests_that_outlast_the_drain_end_with_an_error(model_folder: Path, tmp_path: Path) -> None:
    with server_process(model_folder, tmp_path, drain_seconds=0.2) as server:
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            *_, error, _, done, _ = lines
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
        assert done == "data: [DONE]"
        assert server.exit_code(seconds=10) == 0
