"""A sequence that is served alone, whose Steps run together."""

import time
from typing import get_args

import pytest

from nvium_core import Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.bench.shapes import force_routing
from nvium_core.choices import Schedule
from nvium_core.engine.device import native
from tests.random_models import random_model

PARAMS = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)

schedules = pytest.mark.parametrize("schedule", get_args(Schedule))


@pytest.fixture(scope="module")
def model() -> NviumForCausalLM:
    model = random_model([1, 2, 3], context=64)
    force_routing(model, (0.4, 0.3, 0.3))
    return model


@schedules
def test_its_steps_are_told_one_by_one_and_share_the_time(model: NviumForCausalLM, schedule: Schedule) -> None:
    engine = Engine(model, EngineConfig(schedule=schedule))
    engine.add("x", [1, 2, 3], PARAMS)
    blocks, num_spoken = [], 0
    while engine.has_work:
        started = time.monotonic()
        events = engine.step()
        assert 0 < sum(report.seconds for report in engine.reports) <= time.monotonic() - started
        assert [event for report in engine.reports for event in report.events] == events
        num_spoken += len(events)
        blocks += [report.block for report in engine.reports]
    assert num_spoken == 40
    assert {*blocks} == {1, 2, 3}
    if schedule == "synchronous":  # every block for every token, but for the last one's
        assert blocks[: 3 * 39] == [1, 2, 3] * 39
    engine.check_idle()


@schedules
def test_it_says_what_it_would_step_by_step(
    model: NviumForCausalLM, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Engine(model, EngineConfig(schedule=schedule)).generate([[1, 2, 3]], PARAMS)
    monkeypatch.setattr(native, "knows", lambda *_: False)
    engine = Engine(model, EngineConfig(schedule=schedule))
    engine.add("x", [1, 2, 3], PARAMS)
    events = []
    while engine.has_work:
        events += engine.step()
        assert len(engine.reports) == 1 or schedule == "synchronous"  # whose tokens pass all blocks at once
    assert [(event.token_id, event.exit) for event in events] == list(
        zip(together[0].token_ids, together[0].exits, strict=True)
    )
    assert [event.exit_probability for event in events] == pytest.approx(together[0].exit_probabilities)


@pytest.mark.skipif(native.native_library() is None, reason="no C++ compiler here")
@schedules
def test_a_token_takes_one_call(model: NviumForCausalLM, schedule: Schedule) -> None:
    engine = Engine(model, EngineConfig(schedule=schedule))
    engine.add("x", [1, 2, 3], PARAMS)
    assert all(len(engine.step()) == 1 for _ in range(40))
    assert not engine.has_work
