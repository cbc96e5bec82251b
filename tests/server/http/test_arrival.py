"""A request's arrival is the time of its first bytes. Idle connections are kept alive for a while."""

import json
import socket
import threading
import time
from http.client import HTTPResponse

import httpx
from fastapi import FastAPI, Request

from nvium_core import LoadedModel
from server.http.connection import FAST_PATH, Connection
from server.settings import Settings
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_http import exchange


def post(max_tokens: int, connection: str) -> bytes:
    body = json.dumps({"model": "default", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def test_the_latency_of_a_pipelined_request_includes_the_one_before(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server, log_lines() as log:
        exchange(server, post(200, "keep-alive") + post(1, "close"), patience=20)
        wait_until(lambda: len(log.lines) == 2)
    long, short = log.lines
    assert (long["completion_tokens"], short["completion_tokens"]) == (200, 1)
    assert short["first_token_seconds"] >= long["total_seconds"]


def test_the_arrival_of_a_body_does_not_count_for_the_next_request(byte_model: LoadedModel) -> None:
    first, second = post(1, "keep-alive"), post(1, "close")
    with live_server(byte_model) as server, log_lines() as log, connected(server) as connection:
        connection.sendall(first[:-10])
        time.sleep(0.1)
        connection.sendall(first[-10:])
        connection.recv(65536)
        time.sleep(1)
        connection.sendall(second)
        wait_until(lambda: len(log.lines) == 2)
    assert log.lines[1]["total_seconds"] < 1


def test_an_idle_connection_outlives_the_arrival_timeout(byte_model: LoadedModel) -> None:
    assert Settings().http_keep_alive_seconds == 75
    with live_server(byte_model, arrival_seconds=0.2) as server, connected(server) as connection:
        for _ in range(2):
            assert status_of(connection) == 200
            time.sleep(1)


def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(byte_model: LoadedModel) -> None:
    with live_server(byte_model, http_keep_alive_seconds=0.2) as server, connected(server) as connection:
        assert status_of(connection) == 200
        assert connection.recv(1) == b""


def status_of(connection: socket.socket, path: str = "/livez") -> int:
    """Send a GET request, read the whole response and return its status."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_a_request_that_races_the_keep_alive_timeout_is_answered(byte_model: LoadedModel) -> None:
    connections, is_blocked, has_sent = list[Connection](), threading.Event(), threading.Event()

    def prepare(app: FastAPI) -> None:
        @app.get("/connection")
        async def note(request: Request) -> None:
            connections.append(request.scope["extensions"][FAST_PATH]._transport.get_protocol())

    def run_out() -> None:
        """Let the timeout fire when the next request has arrived but has not been read."""
        is_blocked.set()
        has_sent.wait(30)
        connections[0].timeout_keep_alive_handler()

    with live_server(byte_model, prepare) as server, connected(server) as client:
        assert status_of(client, "/connection") == 200
        connections[0].loop.call_soon_threadsafe(run_out)
        assert is_blocked.wait(30)
        client.sendall(post(1, "close"))
        has_sent.set()
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def connected(server: LiveServer) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=30)
