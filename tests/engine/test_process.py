"""The engine in a process of its own, as an asyncio program sees it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from nvium_core import (
    Admitted,
    Engine,
    EngineConfig,
    EngineError,
    EngineProcess,
    EngineRequest,
    InvalidRequest,
    SamplingParams,
    Score,
    StepReport,
    TokenEvent,
    TokenStream,
    WorkerState,
)
from nvium_core.engine.events import Event
from nvium_core.engine.failures import EngineStopped
from nvium_core.engine.process import decode, encode
from nvium_core.engine.worker import EngineTurn, Observe
from tests.random_models import random_model

PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
LONG = replace(PARAMS, max_tokens=500)


def tiny_engine() -> Engine:
    return Engine(random_model([1, 3], context=512), EngineConfig(max_sequences=4))


def launched(observe: Observe | None = None) -> EngineProcess:
    worker = EngineProcess(tiny_engine().limits, tiny_engine, observe)
    worker.launch()
    worker.start()
    return worker


OBSERVED: list[Event] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[EngineProcess]:
    worker = launched(lambda _, events: OBSERVED.extend(events))
    yield worker
    worker.stop(timeout=10)
    assert not worker.is_alive


def submit(worker: EngineProcess, prompt: list[int], params: SamplingParams) -> TokenStream:
    return worker.submit([EngineRequest(prompt, params)])


async def events_of(stream: TokenStream) -> list[TokenEvent]:
    return [event async for events in stream for event in events if isinstance(event, TokenEvent)]


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_give_what_an_engine_in_this_process_gives_and_every_token_is_observed(
    worker: EngineProcess,
) -> None:
    OBSERVED.clear()
    prompts, params = [[1, 2], [3], [4, 5, 6], [7], [8, 9]], replace(PARAMS, logprobs=2)
    streams = [submit(worker, prompt, params) for prompt in prompts]
    told = await asyncio.gather(*map(events_of, streams))
    expected = tiny_engine().generate(prompts, params)
    assert [[event.token_id for event in events] for events in told] == [each.token_ids for each in expected]
    assert [[event.exit for event in events] for events in told] == [each.exits for each in expected]
    assert [[event.score.logprob for event in events if event.score] for events in told] == [
        pytest.approx([score.logprob for score in each.scores]) for each in expected
    ]
    assert len(OBSERVED) == 5 * 12
    assert all(stream.admissions.keys() == set(stream.keys) for stream in streams)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_closed_stream_frees_its_sequence(worker: EngineProcess) -> None:
    stream = submit(worker, [1], LONG)
    await stream.arrival()
    await until(lambda: worker.state.num_running == 1)
    stream.close()
    await until(lambda: worker.state.num_running == 0)
    assert worker.is_alive


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_request_is_refused_where_it_is_submitted(worker: EngineProcess) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        submit(worker, [10**6], PARAMS)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_idle_process_shows_that_it_lives(worker: EngineProcess) -> None:
    await asyncio.sleep(2)
    assert worker.seconds_since_progress < 1.5
    assert worker.is_alive


@pytest.mark.asyncio
async def test_a_process_that_dies_fails_what_runs_at_once_and_takes_nothing_more() -> None:
    worker = launched()
    streams = [submit(worker, [1], LONG), submit(worker, [2], LONG)]
    await streams[0].arrival()
    os.kill(worker.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*map(events_of, streams), return_exceptions=True), timeout=5)
    assert [type(result) for result in results] == [EngineError, EngineError]
    assert worker.has_failed
    assert not worker.is_alive
    with pytest.raises(EngineStopped):
        submit(worker, [1], PARAMS)
    worker.stop(timeout=5)


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_turn_survives_the_pipe(is_scored: bool) -> None:
    events: list[Event] = [
        TokenEvent("a", 7, 2, 0.25, "stop", 1, Score(-1.5, ((7, -1.5),)) if is_scored else None, is_stop=True),
        TokenEvent("b", 8, 1, 0.5, None),
    ]
    turn = EngineTurn(
        {("a", 1): Admitted(3.5, 16)},
        events,
        [StepReport(1, 9, 2, 0.5), StepReport(2, 3, 2, 0.25)],
        WorkerState(num_running=3, piggyback_speedup=1.25),
    )
    assert decode(encode(turn)) == turn


def failing_engine() -> Engine:
    raise SystemExit(3)


def test_a_process_that_ends_before_it_is_warm_is_an_error() -> None:
    with pytest.raises(EngineStopped, match="while it was starting"):
        EngineProcess(tiny_engine().limits, failing_engine).launch()


ORPHANING = """
import os
from tests.engine.test_process import EngineProcess, tiny_engine
if __name__ == "__main__":
    worker = EngineProcess(tiny_engine().limits, tiny_engine)
    worker.launch()
    print(worker.pid, flush=True)
    os._exit(1)
"""


def test_a_process_does_not_outlive_its_parent(tmp_path: Path) -> None:
    (tmp_path / "orphaning.py").write_text(ORPHANING)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(tmp_path / "orphaning.py")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    state = Path(f"/proc/{int(printed)}/stat")
    deadline = time.monotonic() + 20
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)
