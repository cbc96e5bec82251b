"""Limits on sizes and counts, and unusual but valid HTTP."""

import asyncio
import json

import pytest

from tests.byte_model import NAME
from tests.server.live_server import live_server, wait_until
from tests.server.raw_client import PATHS, STARTS, asked, asking, connected, error_of, request

MAX_BODY_BYTES = 2_000_000


async def test_a_list_of_1024_prompts_is_answered_in_order(server):
    prompts = [f"{number:x}" for number in range(1024)]
    together = await asked(server.url, asking(max_tokens=2, prompt=prompts))
    assert len(together.spoken()) == 1024
    for number in (0, 500, 1023):
        alone = await asked(server.url, asking(max_tokens=2, prompt=prompts[number]))
        assert alone.spoken()[0] == together.spoken()[number]
    refused = await asked(server.url, asking(max_tokens=2, prompt=[*prompts, "a"]))
    assert (refused.status, error_of(refused)["param"]) == (400, "prompt")


@pytest.mark.parametrize("path", PATHS)
async def test_the_maximum_number_of_choices_is_allowed_and_no_more(server, path):
    assert sorted((await asked(server.url, asking(path, max_tokens=2, n=128))).spoken()) == list(range(128))
    refused = await asked(server.url, asking(path, max_tokens=2, n=129))
    assert (refused.status, error_of(refused)["param"]) == (400, "n")


async def test_the_context_can_be_filled_to_its_last_token(byte_model):
    """A text that cannot fit is refused without tokenizing it."""
    with live_server(byte_model, context=100) as server:
        assert len((await asked(server.url, asking(max_tokens=96))).spoken()[0]) == 96
        text = "a" * 100_000
        for refused, param in (
            (asking(max_tokens=97), "max_tokens"),
            (asking(prompt=text), "prompt"),
            (asking(PATHS[1], messages=[{"role": "user", "content": text}]), "messages"),
        ):
            answer = await asked(server.url, refused)
            assert (answer.status, error_of(answer)["code"]) == (400, "context_length_exceeded")
            assert error_of(answer)["param"] == param
            assert "100" in str(error_of(answer)["message"])


async def test_the_maximum_number_of_new_tokens_is_allowed_and_no_more(byte_model):
    with live_server(byte_model, max_new_tokens=24) as server:
        assert (await asked(server.url, asking(prompt=["a", "b"], n=3, max_tokens=4))).status == 200
        refused = await asked(server.url, asking(prompt=["a", "b"], n=3, max_tokens=5))
        assert (refused.status, error_of(refused)["param"]) == (400, "max_tokens")


async def test_alternatives_are_limited_over_all_scored_tokens(server):
    scoring = {"prompt": [[5] * 1000] * 10, "max_tokens": 0, "echo": True, "logprobs": 20}
    assert (await asked(server.url, asking(**scoring))).status == 200
    refused = await asked(server.url, asking(**scoring | {"max_tokens": 1}))
    assert (refused.status, error_of(refused)["param"]) == (400, "logprobs")
    chat = {"n": 100, "logprobs": True, "top_logprobs": 20}
    refused = await asked(server.url, asking(PATHS[1], max_tokens=101, **chat))
    assert (refused.status, error_of(refused)["param"]) == (400, "top_logprobs")
    answer = await asked(server.url, asking(PATHS[1], max_tokens=None, ignore_eos=True, **chat))
    assert {len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]} == {100}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_maximum_body_size_is_allowed_and_not_a_byte_more(server, path, is_chunked):
    body = json.dumps({"model": NAME, **STARTS[path], "max_tokens": 2}).encode().ljust(MAX_BODY_BYTES)
    assert (await asked(server.url, request(path, body, is_chunked=is_chunked))).status == 200
    refused = await asked(server.url, request(path, body + b" ", is_chunked=is_chunked))
    assert (refused.status, error_of(refused)["code"]) == (413, "body_too_large")
    assert refused.headers["connection"] == "close"


@pytest.mark.parametrize("target", ["*", "http://evil/v1/models", "/%00", "/%ff%fe", "//", "/v1/models/" + "x" * 5_000])
async def test_odd_targets_are_not_found(server, target):
    answer = await asked(server.url, request(target, method="GET"))
    assert answer.status == 404
    error_of(answer)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_protocol_upgrades_are_refused_without_a_log_line(server, protocol, caplog):
    headers = {"connection": "upgrade", "upgrade": protocol, "sec-websocket-version": "13"}
    answer = await asked(server.url, request("/v1/completions", method="GET", headers=headers))
    assert answer.status == 405
    error_of(answer)
    assert not caplog.records


async def test_expect_100_continue_is_answered(server):
    head, end, body = asking(max_tokens=2).replace(b"host:", b"expect: 100-continue\r\nhost:").partition(b"\r\n\r\n")
    async with connected(server.url) as connection:
        await connection.send(head + end)
        assert await connection.head() == (100, {})
        await connection.send(body)
        assert (await connection.answer()).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_pipelined_requests_are_answered_in_order(server, stream):
    sizes = [3, 1, 2]
    async with connected(server.url) as connection:
        await connection.send(b"".join(asking(max_tokens=size, stream=stream) for size in sizes))
        assert [len((await connection.answer()).spoken()[0]) for _ in sizes] == sizes


async def test_more_pipelined_requests_than_the_read_buffer_are_answered(server):
    async with connected(server.url) as connection:
        sending = asyncio.create_task(connection.send(asking(max_tokens=2, user="x" * 90_000) * 4))
        assert [(await connection.answer()).status for _ in range(4)] == [200] * 4
        await sending
    wait_until(lambda: server.service.admission.num_present == 0)
