import asyncio
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nvium_core import LoadedModel
from server.http.shares import MULTIPLE, Shares
from tests.byte_model import NAME
from tests.server.http.test_keys import bearer
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.raw_client import JSON, asked, connected, post
from tests.server.test_limits import error_of

KEYS = ("alice", "bob", "eve")
KEYS_SET = "bob:sk-b,eve:sk-e"


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 20), st.booleans())))
def test_shares_stay_within_the_capacity_and_leave_a_part_free(
    capacity: int, steps: list[tuple[str, int, bool]]
) -> None:
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
            shares.take(amount, key)
            held[key].append(amount)
    assert shares.num_held == sum(map(sum, held.values()))


@given(st.integers(4, 200), st.lists(st.integers(1, 5)))
def test_a_busy_key_leaves_a_quarter_to_others(capacity: int, amounts: list[int]) -> None:
    shares = Shares(capacity)
    shares.fits(1, "bob")
    for amount in [1, *amounts, *[1] * capacity]:
        if shares.fits(amount, "eve"):
            shares.take(amount, "eve")
    assert capacity - shares.num_held in (capacity // 4, -(-capacity // 4))
    assert shares.fits(capacity - shares.num_held, "bob")


def test_a_request_in_pieces_counts_as_one() -> None:
    shares = Shares(10)
    shares.fits(1, "bob")
    for taken in range(10):
        assert shares.fits(1, "eve", held_by_request=taken)
        shares.take(1, "eve")


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


async def test_a_key_cannot_fill_the_whole_queue(byte_model: LoadedModel) -> None:
    with live_server(byte_model, api_keys=KEYS_SET, max_sequences=2, max_queue=6) as server:
        assert await gets_an_answer(server, "sk-b")
        async with AsyncExitStack() as held:
            await hold(server, held, 6, long_request("sk-e"))
            error = error_of(await asked(server.url, long_request("sk-e")))
            assert error["code"] == "queue_full"
            assert error["message"].startswith(
                "the rest of the queue is reserved for other keys: 6 of 8 choices are running or waiting"
            )
            two_choices = await held.enter_async_context(connected(server.url))
            await two_choices.send(long_request("sk-b", n=2))
            await asyncio.to_thread(wait_until, lambda: server.service.admission.num_present == 8)


async def test_the_only_active_key_may_fill_the_queue(byte_model: LoadedModel) -> None:
    with live_server(byte_model, api_keys=KEYS_SET, max_sequences=2, max_queue=6) as server:
        async with AsyncExitStack() as held:
            await hold(server, held, 8, long_request("sk-e"))
            error = error_of(await asked(server.url, long_request("sk-e")))
            assert error["message"].startswith("the queue is full: 8 of 8 choices")


async def test_a_key_cannot_fill_the_memory_for_bodies(byte_model: LoadedModel) -> None:
    large = {"user": "x" * 30_000}
    with live_server(byte_model, api_keys=KEYS_SET, max_body_bytes=60_000, max_present_bytes=200_000) as server:
        assert await gets_an_answer(server, "sk-b")
        async with AsyncExitStack() as held:
            await hold(server, held, 4, long_request("sk-e", **large))
            error = error_of(await asked(server.url, long_request("sk-e", **large)))
            assert error["code"] == "bodies_too_large"
            assert await gets_an_answer(server, "sk-b", **large)
            assert not await gets_an_answer(server, "sk-e", **large)
