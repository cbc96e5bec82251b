"""The device thread as an asyncio program sees it."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import pytest_asyncio

from nvium_core import (
    ChoiceKey,
    Engine,
    EngineConfig,
    EngineError,
    EngineRequest,
    EngineWorker,
    Event,
    InvalidRequest,
    NviumForCausalLM,
    SamplingParams,
    StepReport,
    TokenEvent,
    TokenStream,
)
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule.step import Step, StepResult
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


def submit(worker: EngineWorker, prompt: list[int], params: SamplingParams) -> TokenStream:
    return worker.submit([EngineRequest(prompt, params)])


async def collect(stream: TokenStream) -> list[int]:
    return [event.token_id async for events in stream for event in events if isinstance(event, TokenEvent)]


async def until(condition: object, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_streams_give_what_the_engine_alone_would_give(worker: EngineWorker, model: NviumForCausalLM) -> None:
    prompts = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
    streamed = await asyncio.gather(*(collect(submit(worker, prompt, PARAMS)) for prompt in prompts))
    assert list(streamed) == [c.token_ids for c in Engine(model).generate(prompts, PARAMS)]


@pytest.mark.asyncio
async def test_leaving_a_stream_early_frees_its_sequence(worker: EngineWorker) -> None:
    stream = submit(worker, [1], SamplingParams(max_tokens=500, ignore_eos=True))
    iterator = aiter(stream)
    await anext(iterator)
    await iterator.aclose()
    await until(lambda: not worker.engine.has_work)
    assert worker.engine.scheduler.pool.usage == 0


@pytest.mark.asyncio
async def test_a_cancelled_task_frees_its_sequence(worker: EngineWorker) -> None:
    task = asyncio.create_task(collect(submit(worker, [1], SamplingParams(max_tokens=500, ignore_eos=True))))
    await until(lambda: worker.state.num_running == 1)
    task.cancel()
    await until(lambda: not worker.engine.has_work)
    assert worker.engine.scheduler.pool.usage == 0


@pytest.mark.asyncio
async def test_a_bad_request_is_refused_where_it_is_submitted(worker: EngineWorker) -> None:
    with pytest.raises(InvalidRequest, match=r"in \[0, "):
        submit(worker, [10_000], PARAMS)


@pytest.mark.asyncio
async def test_the_event_loop_stays_responsive_while_the_device_works(worker: EngineWorker) -> None:
    busy = [submit(worker, [1] * 200, SamplingParams(max_tokens=100, ignore_eos=True)) for _ in range(4)]
    tasks = [asyncio.create_task(collect(stream)) for stream in busy]
    started = time.monotonic()
    for _ in range(100):
        await asyncio.sleep(0)
    assert time.monotonic() - started < 1.0
    await asyncio.gather(*tasks)


class SlowRunner(Runner):
    """Takes its time over every Step."""

    def run(self, step: Step) -> StepResult:
        time.sleep(0.3)
        return super().run(step)


@pytest.mark.asyncio
async def test_submitting_never_waits_for_the_device(worker: EngineWorker) -> None:
    worker.engine.runner.__class__ = SlowRunner
    first = asyncio.create_task(collect(submit(worker, [1], SamplingParams(max_tokens=1))))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    second = submit(worker, [2], SamplingParams(max_tokens=1))
    assert time.monotonic() - started < 0.1
    assert worker.seconds_since_progress < 5
    await asyncio.gather(first, collect(second))


@pytest.mark.asyncio
async def test_stopping_fails_what_is_running(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model))
    worker.start()
    stream = submit(worker, [1], SamplingParams(max_tokens=500, ignore_eos=True))
    await until(lambda: worker.state.num_running == 1)
    worker.stop(timeout=5)
    with pytest.raises(EngineError, match="stopped"):
        await collect(stream)
    assert not worker.is_alive


@pytest.mark.asyncio
async def test_every_turn_is_observed_once_with_its_events(model: NviumForCausalLM) -> None:
    turns: list[tuple[Sequence[StepReport], Sequence[Event]]] = []
    worker = EngineWorker(Engine(model), observe=lambda reports, events: turns.append((reports, events)))
    worker.start()
    tokens = await collect(submit(worker, [1], PARAMS))
    worker.stop(timeout=5)
    assert all(reports for reports, events in turns if events)
    assert [event.token_id for _, events in turns for event in events if isinstance(event, TokenEvent)] == tokens


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.asyncio
async def test_a_panic_on_the_device_thread_is_a_failure_too(
    model: NviumForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics() -> None:
        raise Panic

    worker = EngineWorker(Engine(model))
    monkeypatch.setattr(worker.engine, "step", panics)
    worker.start()
    with pytest.raises(EngineError, match="failed"):
        await collect(submit(worker, [1], PARAMS))
    assert worker.has_failed


@pytest.mark.asyncio
async def test_a_closed_stream_is_forgotten(worker: EngineWorker) -> None:
    await collect(submit(worker, [1], PARAMS))
    assert not worker._open_streams
    with pytest.raises(InvalidRequest):
        submit(worker, [1], replace(PARAMS, max_tokens=0))
    assert not worker._open_streams


@pytest.mark.asyncio
async def test_a_request_after_the_thread_has_ended_is_refused(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model))
    worker.start()
    worker.stop(timeout=5)
    with pytest.raises(EngineError, match="stopped"):
        submit(worker, [1], PARAMS)


@pytest.mark.asyncio
async def test_requests_submitted_together_tell_one_stream_each_choice_by_its_key(
    worker: EngineWorker, model: NviumForCausalLM
) -> None:
    requests = [EngineRequest([1, 2], replace(PARAMS, n=2)), EngineRequest([3], PARAMS)]
    stream = worker.submit(requests)
    told: dict[ChoiceKey, list[int]] = {key: [] for key in stream.keys}
    async for events in stream:
        for event in events:
            assert isinstance(event, TokenEvent)
            told[event.sequence_id, event.choice].append(event.token_id)
    alone = [c.token_ids for request in requests for c in Engine(model).generate([request.token_ids], request.params)]
    assert list(told.values()) == alone
    assert stream.admissions.keys() == told.keys()


@pytest.mark.asyncio
async def test_a_cancelled_choice_tells_no_more_and_the_others_go_on(worker: EngineWorker) -> None:
    stream = worker.submit([EngineRequest([1], replace(PARAMS, n=3, max_tokens=100))])
    cancelled, *others = stream.keys
    told: Counter[ChoiceKey] = Counter()
    async for events in stream:
        told.update((event.sequence_id, event.choice) for event in events)
        stream.cancel(cancelled)
    assert [told[key] for key in others] == [100, 100]
    assert 0 < told[cancelled] < 100


@pytest.mark.asyncio
async def test_requests_of_which_one_is_bad_are_refused_together(worker: EngineWorker) -> None:
    with pytest.raises(InvalidRequest, match=r"in \[0, "):
        worker.submit([EngineRequest([1], PARAMS), EngineRequest([10_000], PARAMS)])
    assert not worker.engine.has_work


@pytest.mark.asyncio
async def test_events_nobody_takes_are_given_together_in_the_end(worker: EngineWorker) -> None:
    stream = submit(worker, [1], PARAMS)
    await until(lambda: len(stream._events) == PARAMS.max_tokens)
    assert [len(events) async for events in stream] == [PARAMS.max_tokens]


@pytest.mark.asyncio
async def test_requests_of_different_tenants_are_let_in_by_turns(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model, EngineConfig(max_sequences=1)))
    tenants = ["many", "many", "many", "few"]
    streams = [worker.submit([EngineRequest([1], PARAMS)], tenant) for tenant in tenants]
    worker.start()
    await asyncio.gather(*map(collect, streams))
    worker.stop(timeout=5)
    many, second, third, few = [stream.admissions[stream.keys[0]].at for stream in streams]
    assert many < few < second < third


@pytest.mark.asyncio
async def test_each_choice_is_told_what_of_its_prompt_was_found(worker: EngineWorker) -> None:
    found = []
    for _ in range(2):
        stream = worker.submit([EngineRequest([1, 2, 3, 4] * 10, replace(PARAMS, n=2))])
        assert stream.admissions == {}
        await collect(stream)
        found.append([stream.admissions[key].num_cached_prompt_tokens for key in stream.keys])
    assert found == [[0, 32], [32, 32]]


@pytest.mark.asyncio
async def test_the_measured_speedup_is_told(model: NviumForCausalLM) -> None:
    worker = EngineWorker(Engine(model))
    worker.engine.warm_up()
    worker.start()
    await collect(submit(worker, [1], PARAMS))
    await until(lambda: worker.state.num_running == 0)
    worker.stop(timeout=5)
    assert worker.state.piggyback_speedup > 0
