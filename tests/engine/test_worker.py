import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

import pytest

from nvium_core import (
    ChoiceKey,
    Engine,
    EngineConfig,
    EngineError,
    EngineWorker,
    Event,
    FailureEvent,
    InvalidRequest,
    PromptEvent,
    SamplingParams,
    StepReport,
    TokenEvent,
    TokenStream,
)
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult, policies_of
from nvium_core.engine.schedule.tuner import Tuner
from tests.random_models import random_model

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
MODEL = random_model([1, 3], context=512)


@pytest.fixture
async def worker() -> AsyncIterator[EngineWorker]:
    worker = EngineWorker(Engine(MODEL, EngineConfig(max_sequences=4)))
    worker.start()
    yield worker
    worker.stop(timeout=5)
    worker.engine.check_integrity()


async def batches(stream: TokenStream) -> AsyncGenerator[list[TokenEvent | PromptEvent]]:
    """Yield the events as they arrive, and close the stream in the end."""
    try:
        while not stream.is_over:
            await stream.arrival()
            if events := [event for events in stream.take().values() for event in events]:
                yield events
    finally:
        stream.close()


async def collect(stream: TokenStream) -> list[int]:
    return [event.token_id async for events in batches(stream) for event in events if isinstance(event, TokenEvent)]


async def until(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.005)


class HeldRunner(Runner):
    begun, held = threading.Event(), threading.Event()

    def run(self, step: Step) -> StepResult:
        self.begun.set()
        assert self.held.wait(30)
        return super().run(step)


async def test_submitting_never_waits_for_the_device(worker):
    worker.engine.runner.__class__ = HeldRunner
    first = worker.submit([[1]], SamplingParams(max_tokens=1))
    assert await asyncio.to_thread(HeldRunner.begun.wait, 30)
    second = worker.submit([[2]], SamplingParams(max_tokens=1))
    HeldRunner.held.set()
    await asyncio.gather(collect(first), collect(second))


async def test_every_step_is_observed_once_with_its_events_and_the_speedup_is_reported():
    steps: list[tuple[Sequence[StepReport], Sequence[Event]]] = []
    engine = Engine(MODEL)
    engine.scheduler.schedules = Tuner(policies_of("race", MODEL.config.num_exits), first_pause=0)
    worker = EngineWorker(engine, observe=lambda reports, events: steps.append((reports, events)))
    worker.start()
    tokens = await collect(worker.submit([[1]], replace(PARAMS, max_tokens=500)))
    await until(lambda: worker.state.num_running == 0)
    worker.stop(timeout=5)
    assert worker.state.piggyback_speedup > 0
    assert all(reports for reports, events in steps if events)
    assert [event.token_id for _, events in steps for event in events if isinstance(event, TokenEvent)] == tokens


class Panic(BaseException):
    """Like a panic in a Rust library."""


async def test_a_panic_on_the_device_thread_is_a_failure_too(monkeypatch):
    def panics() -> None:
        raise Panic

    worker = EngineWorker(Engine(MODEL))
    monkeypatch.setattr(worker.engine, "step", panics)
    worker.start()
    with pytest.raises(EngineError, match="failed"):
        await collect(worker.submit([[1]], PARAMS))
    assert worker.has_failed


async def test_closed_streams_and_those_of_refused_requests_are_forgotten(worker):
    await collect(worker.submit([[1]], PARAMS))
    assert not worker._open_streams
    with pytest.raises(InvalidRequest, match=r"in \[0, "):
        worker.submit([[1], [10_000]], PARAMS)
    assert not worker._open_streams
    assert not worker.engine.has_work


async def test_requests_submitted_together_share_a_stream_with_a_key_per_choice(worker):
    prompts, params = [[1, 2], [3]], replace(PARAMS, n=2)
    stream = worker.submit(prompts, params)
    received: dict[ChoiceKey, list[int]] = {key: [] for key in stream.keys}
    async for events in batches(stream):
        for event in events:
            assert isinstance(event, TokenEvent)
            received[event.request_id, event.choice].append(event.token_id)
    alone = [completion.token_ids for completion in Engine(MODEL).generate(prompts, params)]
    assert list(received.values()) == alone
    assert stream.admissions.keys() == received.keys()


async def test_tokens_before_a_failure_arrive_although_they_are_handed_over_together():
    stream = TokenStream([("a", 0)], lambda key: None, lambda stream: None)
    tokens = [TokenEvent("a", token_id, 1, 1.0, None) for token_id in (5, 6)]
    stream.deliver([*tokens, FailureEvent("a", EngineError("a defect"))])
    assert stream.take() == {("a", 0): tokens} and not stream.is_over
    await stream.arrival()
    with pytest.raises(EngineError, match="a defect"):
        stream.take()


async def test_a_cancelled_choice_ends_and_the_others_continue(worker):
    stream = worker.submit([[1]], replace(PARAMS, n=3, max_tokens=500))
    cancelled, *others = stream.keys
    received: Counter[ChoiceKey] = Counter()
    async for events in batches(stream):
        received.update((event.request_id, event.choice) for event in events)
        stream.cancel(cancelled)
    assert [received[key] for key in others] == [500, 500]
    assert 0 < received[cancelled] < 500


async def test_events_accumulate_until_they_are_taken(worker):
    stream = worker.submit([[1]], PARAMS)
    await until(lambda: len(stream._events) == PARAMS.max_tokens)
    assert [len(events) async for events in batches(stream)] == [PARAMS.max_tokens]


async def test_tenants_are_admitted_in_turn():
    worker = EngineWorker(Engine(MODEL, EngineConfig(max_sequences=1)))
    streams = [worker.submit([[1]], PARAMS, tenant) for tenant in ["many", "many", "many", "few"]]
    worker.start()
    await asyncio.gather(*map(collect, streams))
    worker.stop(timeout=5)
    many, second, third, few = [stream.admissions[stream.keys[0]].at for stream in streams]
    assert many < few < second < third


async def test_each_choice_reports_its_cached_prompt_tokens(worker):
    found = []
    for _ in range(2):
        stream = worker.submit([[1, 2, 3, 4] * 10], replace(PARAMS, n=2))
        await collect(stream)
        found.append([stream.admissions[key].num_cached_prompt_tokens for key in stream.keys])
    assert found == [[0, 32], [32, 32]]
