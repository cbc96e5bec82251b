"""When a request came is when its first bytes were read, however late its turn comes."""

import json
import socket
import time

import httpx

from nvium_core import LoadedModel
from tests.server.live_server import live_server, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_http import exchange


def post(max_tokens: int, connection: str) -> bytes:
    body = json.dumps({"model": "default", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_a_request_sent_behind_another_has_waited_for_its_answer_too(byte_model: LoadedModel) -> None:
    with live_server(byte_model) as server, log_lines() as log:
        exchange(server, post(200, "keep-alive") + post(1, "close"), patience=20)
        wait_until(lambda: len(log.lines) == 2)
    long, short = log.lines
    assert (long["completion_tokens"], short["completion_tokens"]) == (200, 1)
    assert short["first_token_seconds"] >= long["total_seconds"]


def test_a_body_that_follows_its_head_does_not_make_the_next_request_older(byte_model: LoadedModel) -> None:
    first, second = post(1, "keep-alive"), post(1, "close")
    with live_server(byte_model) as server, log_lines() as log:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port), timeout=20) as connection:
            connection.sendall(first[:-10])
            time.sleep(0.1)
            connection.sendall(first[-10:])
            connection.recv(65536)
            time.sleep(1)
            connection.sendall(second)
            wait_until(lambda: len(log.lines) == 2)
    assert log.lines[1]["total_seconds"] < 1
