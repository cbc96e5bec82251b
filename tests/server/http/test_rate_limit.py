"""What each key may use: its share of the queue and of memory, and requests per minute."""

import asyncio
import re
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.admission import MULTIPLE, Shares
from server.http.rate_limit import RateLimit
from tests.byte_model import NAME
from tests.server.http.test_keys import Reached, bearer, called
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import JSON, asked, connected, error_of, post

KEYS = ("alice", "bob", "eve")
KEYS_SET = "bob:sk-b,eve:sk-e"


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 20), st.booleans())))
def test_shares_stay_within_the_capacity_and_leave_a_part_free(capacity, steps):
    shares, held, asked_before = Shares(capacity), {key: list[int]() for key in KEYS}, set[str]()
    for key, amount, gives_back in steps:
        if gives_back and held[key]:
            shares.give_back(held[key].pop(), key)
            continue
        own, free = sum(held[key]) + amount, capacity - sum(map(sum, held.values())) - amount
        asked_before.add(key)
        is_free_to = not held[key] or asked_before == {key}
        expected = free >= 0 and (is_free_to or own <= MULTIPLE * free)
        assert shares.fits(amount, key) == expected
        if expected:
            shares.acquire(amount, key)
            held[key].append(amount)
    assert shares.num_held == sum(map(sum, held.values()))


@given(st.integers(4, 200), st.lists(st.integers(1, 5)))
def test_a_busy_key_leaves_a_quarter_to_others(capacity, amounts):
    shares = Shares(capacity)
    shares.fits(1, "bob")
    for amount in [1, *amounts, *[1] * capacity]:
        if shares.fits(amount, "eve"):
            shares.acquire(amount, "eve")
    assert capacity - shares.num_held in (capacity // 4, -(-capacity // 4))
    assert shares.fits(capacity - shares.num_held, "bob")


def test_a_request_in_pieces_counts_as_one():
    shares = Shares(10)
    shares.fits(1, "bob")
    for taken in range(10):
        assert shares.fits(1, "eve", held_by_request=taken)
        shares.acquire(1, "eve")


def long_request(key: str, **fields: Any) -> bytes:
    body = {"model": NAME, "prompt": "Once", "ignore_eos": True, "max_tokens": 4000, **fields}
    return post("/v1/completions", body, headers={**JSON, **bearer(key)})


async def hold(server: LiveServer, held: AsyncExitStack, number: int, request: bytes) -> None:
    """Send a request `number` times and wait until all are admitted. They disconnect when the stack closes."""
    for _ in range(number):
        connection = await held.enter_async_context(connected(server.url))
        await connection.send(request)
    await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == number)


async def gets_an_answer(server: LiveServer, key: str, **fields: Any) -> bool:
    return (await asked(server.url, long_request(key, **{"max_tokens": 1, **fields}))).status == 200


async def test_a_key_may_fill_the_whole_queue_until_another_key_is_active(byte_model):
    with live_server(byte_model, api_keys=KEYS_SET, max_sequences=2, max_queue=6) as server:
        async with AsyncExitStack() as held:
            await hold(server, held, 8, long_request("sk-e"))
            error = error_of(await asked(server.url, long_request("sk-e")))
            assert error["message"].startswith("the queue is full: 8 of 8 choices")
        await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == 0)
        assert await gets_an_answer(server, "sk-b")
        async with AsyncExitStack() as held:
            await hold(server, held, 6, long_request("sk-e"))
            error = error_of(await asked(server.url, long_request("sk-e")))
            assert error["code"] == "queue_full"
            reserved = "the rest of the queue is reserved for other keys: 6 of 8 choices are running or waiting"
            assert error["message"].startswith(reserved)
            two_choices = await held.enter_async_context(connected(server.url))
            await two_choices.send(long_request("sk-b", n=2))
            await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == 8)


async def test_a_key_cannot_fill_the_memory_for_bodies(byte_model):
    large = {"user": "x" * 30_000}
    with live_server(byte_model, api_keys=KEYS_SET, max_body_bytes=60_000, max_present_bytes=200_000) as server:
        assert await gets_an_answer(server, "sk-b")
        async with AsyncExitStack() as held:
            await hold(server, held, 4, long_request("sk-e", **large))
            assert error_of(await asked(server.url, long_request("sk-e", **large)))["code"] == "bodies_too_large"
            assert await gets_an_answer(server, "sk-b", **large)
            assert not await gets_an_answer(server, "sk-e", **large)


PER_MINUTE = 4
EXEMPT = ("/v1/models", "/livez", "/readyz", "/health", "/", "/assets/page.js", "/metrics")


@given(st.lists(st.tuples(st.sampled_from(["", "alice", "bob"]), st.sampled_from(["/version", "/nope", *EXEMPT]))))
async def test_the_limit_applies_to_each_key(requests):
    reached = Reached()
    layer = RateLimit(reached, PER_MINUTE)
    counted: Counter[str] = Counter()
    for key_id, path in requests:
        [start, *_] = await called(layer, "GET", path, key_id=key_id)
        counted[key_id] += path not in EXEMPT
        is_refused = path not in EXEMPT and counted[key_id] > PER_MINUTE
        assert start["status"] == (429 if is_refused else 200)
    refused = sum(max(0, count - PER_MINUTE) for count in counted.values())
    assert len(reached.states) == len(requests) - refused


@given(st.lists(st.tuples(st.sampled_from(["alice", "bob"]), st.sampled_from([0.0, 0.5, 14.5, 29.75, 60.0]))))
async def test_the_limit_applies_to_any_60_seconds(requests):
    now = 0.0
    layer = RateLimit(Reached(), PER_MINUTE, clock=lambda: now)
    accepted: list[tuple[str, float]] = []
    for key_id, seconds in requests:
        now += seconds
        [start, *_] = await called(layer, "GET", "/version", key_id=key_id)
        within = [at for other, at in accepted if other == key_id and at > now - 60]
        assert start["status"] == (200 if len(within) < PER_MINUTE else 429)
        if start["status"] == 200:
            accepted.append((key_id, now))


async def test_only_the_times_within_the_limit_are_stored():
    layer = RateLimit(Reached(), PER_MINUTE)
    for _ in range(50):
        for key_id in ("alice", "bob"):
            await called(layer, "POST", "/v1/completions", key_id=key_id)
    assert [len(times) for times in layer.times.values()] == [PER_MINUTE] * 2


def test_responses_show_the_remaining_requests_and_refusals_when_to_retry(byte_model):
    with live_server(byte_model, api_keys="alice:sk-a,bob:sk-b", requests_per_minute=2) as server:
        alice = bearer("sk-a") | {"x-request-id": "mine"}
        assert server.http.get("/v1/models", headers=alice).status_code == 200
        answers = [server.http.get("/version", headers=alice) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["2"] * 3
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        for answer in answers:
            reset = re.fullmatch(r"(\d+\.\d{3})s", answer.headers["x-ratelimit-reset-requests"])
            assert reset
            assert 0 < float(reset[1]) <= 60
        error = error_of(answers[2])
        assert answers[2].headers["x-request-id"] == "mine"
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 0 < int(answers[2].headers["retry-after"]) <= 60
        assert f"retry in {answers[2].headers['retry-after']} s" in error["message"]

        assert server.http.get("/version", headers=bearer("sk-b")).status_code == 200
        assert server.http.get("/version").status_code == 401
        assert server.http.get("/livez", headers=bearer("sk-a")).status_code == 200
        page = server.http.get("/metrics", headers=bearer("sk-a")).text
        assert 'nvium_rejected_total{reason="rate_limit_exceeded"} 1.0' in page


def test_without_keys_all_clients_share_the_limit(byte_model, server):
    assert not any(name.startswith("x-ratelimit") for name in server.http.get("/version").headers)
    with live_server(byte_model, requests_per_minute=1) as limited:
        completions = limited.client().completions
        assert completions.create(model=NAME, prompt="Once", max_tokens=1).choices
        with pytest.raises(openai.RateLimitError) as refused:
            completions.create(model=NAME, prompt="Once", max_tokens=1)
        assert refused.value.code == "rate_limit_exceeded"
        assert limited.gauge('nvium_requests_total{endpoint="completions",outcome="rejected"}') == 1
