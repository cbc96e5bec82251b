"""The device thread as an asyncio program sees it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from nvium_core import (
    Engine,
    EngineConfig,
    EngineError,
    EngineWorker,
    InvalidRequest,
    NviumForCausalLM,
    SamplingParams,
    StepReport,
    TokenEvent,
    TokenStream,
)
from nvium_core.engine.runner import Outcome, Runner
from nvium_core.engine.scheduler import Step
from tests.random_models import random_model

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> NviumForCausalLM:
    return random_model([1, 3], context=512)


@pytest_asyncio.fixture
async def worker(model: NviumForCausalLM) -> AsyncIterator[EngineWorker]:
    worker = EngineWorker(Engine(model, EngineConfig(max_sequences=4)))
    worker.start()
    yield worker
    worker.stop(timeout=5)
    worker.engine.check_integrity()


async def collect(streams: list[TokenStream]) -> list[int]:
    (stream,) = streams
    return [event.token_id async for events in stream for event in events if isinstance(event, TokenEvent)]


async def until(condition: object, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_streams_give_what_the_engine_alone_would_give(worker: EngineWorker, model: NviumForCausalLM) -> None:
    prompts = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
    streamed = await asyncio.gather(*(collect(worker.submit(prompt, PARAMS)) for prompt in prompts))
    assert list(streamed) == [c.token_ids for c in Engine(model).generate(prompts, PARAMS)]


@pytest.mark.asyncio
async def test_leaving_a_stream_early_frees_its_sequence(worker: EngineWorker) -> None:
    (stream,) = worker.submit([1], SamplingParams(max_tokens=500, ignore_eos=True))
    iterator = aiter(stream)
    await anext(iterator)
    await iterator.aclose()
    await until(lambda: not worker.engine.has_work)
    assert worker.engine.scheduler.pool.usage == 0


@pytest.mark.asyncio
async def test_a_cancelled_task_frees_its_sequence(worker: EngineWorker) -> None:
    task = asyncio.create_task(collect(worker.submit([1], SamplingParams(max_tokens=500, ignore_eos=True))))
    await until(lambda: worker.state.num_running == 1)
    task.cancel()
    await until(lambda: not worker.engine.has_work)
    assert worker.engine.scheduler.pool.usage == 0


@pytest.mark.asyncio
async def test_a_bad_request_is_refused_where_it_is_submitted(worker: EngineWorker) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        worker.submit([10_000], PARAMS)


@pytest.mark.asyncio
async def test_the_event_loop_stays_responsive_while_the_device_works(worker: EngineWorker) -> None:
    busy = [worker.submit([1] * 200, SamplingParams(max_tokens=100, ignore_eos=True)) for _ in range(4)]
    tasks = [asyncio.create_task(collect(stream)) for stream in busy]
    started = time.monotonic()
    for _ in range(100):
        await asyncio.sleep(0)
    assert time.monotonic() - started < 1.0
    await asyncio.gather(*tasks)


class SlowRunner(Runner):
    """Takes its time over every Step."""

    def run(self, step: Step) -> list[Outcome]:
        time.sleep(0.3)
        return super().run(step)


@pytest.mark.asyncio
async def test_submitting_never_waits_for_the_device(worker: EngineWorker) -> None:
    worker.engine.runner.__class__ = SlowRunner
    first = asyncio.create_task(collect(worker.submit([1], SamplingParams(max_tokens=1))))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    second = worker.submit([2], SamplingParams(max_tokens=1))
    assert time.monotonic() - started < 0.1
    assert worker.seconds_since_progress < 5
    await asyncio.gather(first, collect(second))


@pytest.mark.asyncio
async def test_stopping_fails_what_is_running(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model))
    worker.start()
    stream = worker.submit([1], SamplingParams(max_tokens=500, ignore_eos=True))
    await until(lambda: worker.state.num_running == 1)
    worker.stop(timeout=5)
    with pytest.raises(EngineError, match="stopped"):
        await collect(stream)
    assert not worker.is_alive


class CountingRunner(Runner):
    """Counts the Steps it carries out."""

    num_steps = 0

    def run(self, step: Step) -> list[Outcome]:
        self.num_steps += 1
        return super().run(step)


@pytest.mark.asyncio
async def test_every_step_is_observed_once_with_its_events(model: NviumForCausalLM) -> None:
    reports: list[StepReport] = []
    engine = Engine(model)
    engine.runner = runner = CountingRunner(model, num_pages=64, page_size=16, max_sequences=32)
    worker = EngineWorker(engine, observe=reports.append)
    worker.start()
    tokens = await collect(worker.submit([1], PARAMS))
    worker.stop(timeout=5)
    assert len(reports) == runner.num_steps
    spoken = [event for report in reports for event in report.events if isinstance(event, TokenEvent)]
    assert [event.token_id for event in spoken] == tokens


@pytest.mark.asyncio
async def test_a_request_after_the_thread_has_ended_is_refused(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model))
    worker.start()
    worker.stop(timeout=5)
    with pytest.raises(EngineError, match="stopped"):
        worker.submit([1], PARAMS)


@pytest.mark.asyncio
async def test_streams_of_different_tenants_are_let_in_by_turns(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model, EngineConfig(max_sequences=1)))
    streams = [worker.submit([1], PARAMS, tenant)[0] for tenant in ["many", "many", "many", "few"]]
    worker.start()
    await asyncio.gather(*(collect([stream]) for stream in streams))
    worker.stop(timeout=5)
    many, second, third, few = [stream.admitted_at for stream in streams]
    assert None not in (many, second, third, few)
    assert many < few < second < third  # type: ignore[operator]


@pytest.mark.asyncio
async def test_each_choice_is_told_what_of_its_prompt_was_found(worker: EngineWorker) -> None:
    found = []
    for _ in range(2):
        streams = worker.submit([1, 2, 3, 4] * 10, replace(PARAMS, n=2))
        assert [stream.num_cached_prompt_tokens for stream in streams] == [None, None]
        await asyncio.gather(*(collect([stream]) for stream in streams))
        found.append([stream.num_cached_prompt_tokens for stream in streams])
    assert found == [[0, 32], [32, 32]]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_calibrated", [True, False])
async def test_the_speedup_is_told_where_costs_are_known(model: NviumForCausalLM, is_calibrated: bool) -> None:
    worker = EngineWorker(Engine(model))
    if is_calibrated:
        worker.engine.calibrate()
    assert math.isnan(worker.state.piggyback_speedup)
    worker.start()
    await collect(worker.submit([1], PARAMS))
    worker.stop(timeout=5)
    assert math.isnan(worker.state.piggyback_speedup) != is_calibrated
