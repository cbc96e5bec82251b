"""Schedules on a real model: whole passes, sweeps, their race, several tokens per call, lost devices."""

import math
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.device import runner
from nvium_core.engine.device.layers import LayersBackend
from nvium_core.engine.errors import DeviceLost
from nvium_core.engine.schedule.scheduler import MULTI_STEP_SECONDS
from nvium_core.engine.schedule.step import SWEEP, WHOLE, Policy, Step, StepResult
from nvium_core.engine.schedule.tuner import Tuner
from tests.engine.device.native.compiling import needs_compiler
from tests.engine.driving import WrappedBackend, alone, engine_on, events_of
from tests.engine.test_exactness import check, configs, models, requests, served
from tests.random_models import random_model

PARAMS = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)

schedules = pytest.mark.parametrize("schedule", get_args(Schedule))


class Fickle(Tuner[Policy]):
    def __init__(self, seed: int) -> None:
        super().__init__([WHOLE, SWEEP])
        self._random = Random(seed)

    def choose(self, num_sequences: int) -> Policy:
        return self._random.choice([WHOLE, SWEEP])


@settings(max_examples=settings().max_examples // 2)
@given(models(), configs, st.lists(requests(), min_size=1, max_size=5), st.integers(0, 99), st.booleans())
def test_tokens_and_exits_equal_algorithm_1_however_passes_and_sweeps_alternate(model, config, plan, seed, is_native):
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(runner, "supports", lambda *_: config.deterministic)
        engine = Engine(model, config)
    engine.scheduler.schedules = Fickle(seed)
    check(model, served(engine, plan), plan)


@needs_compiler
@schedules
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_call_emits_several_tokens(schedule, temperature, monkeypatch):
    monkeypatch.setattr("nvium_core.engine.schedule.scheduler.MULTI_STEP_SECONDS", 1000 * MULTI_STEP_SECONDS)
    engine = Engine(random_model([1, 2, 3], context=64), EngineConfig(schedule=schedule))
    engine.add("x", [1, 2, 3], SamplingParams(max_tokens=40, seed=5, temperature=temperature, ignore_eos=True))
    calls = []
    while engine.has_work:
        calls.append(len(engine.step()))
        engine.check_integrity()
    assert sum(calls) == 40
    assert max(calls) > 8


def test_a_pass_emits_a_token_of_every_sequence():
    engine = Engine(random_model([1, 2, 4]), EngineConfig(schedule="whole", max_sequences=5))
    for number in range(5):
        engine.add(str(number), [1, 2, number], SamplingParams(max_tokens=6, seed=number, ignore_eos=True))
    while engine.has_work:
        assert sorted({event.request_id for event in engine.step()}) == list("01234")
        assert [report.block for report in engine.reports] == [1, 2, 3]
        assert len({report.num_passes for report in engine.reports}) == 1


def test_a_sequence_without_early_exits_makes_all_steps_whole_and_pauses_the_race():
    model = random_model([1, 2, 4], context=64)
    engine = Engine(model, EngineConfig(schedule="race"))
    for name, early_exits, max_tokens in (("long", True, 30), ("whole", False, 10)):
        engine.add(name, [1, 2, 3], replace(PARAMS, early_exits=early_exits, max_tokens=max_tokens))
    engine.step()
    while len(engine.admission.running) == 2:
        engine.step()
        assert len({report.num_rows for report in engine.reports}) == 1
    assert math.isnan(engine.scheduler.schedules.ratio)
    completions = [alone(model, [1, 2, 3], replace(PARAMS, early_exits=early_exits)) for early_exits in (True, False)]
    assert completions[0].token_ids == completions[1].token_ids
    assert completions[0].exits == completions[1].exits


class Lost(WrappedBackend):
    error: Exception

    def run(self, step: Step, max_rows: int) -> StepResult:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling ..."), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("shapes do not match"), False),
    ],
    ids=["illegal access", "an accelerator out of memory", "cuBLAS", "out of memory", "an ordinary error"],
)
def test_a_lost_device_ends_the_engine_and_other_errors_end_their_sequences(error, is_lost):
    engine = engine_on(Lost, random_model([1, 2]), EngineConfig())
    engine.runner.backend.error = error
    for number in range(3):
        engine.add(str(number), [1, 2], SamplingParams(max_tokens=2))
    if is_lost:
        with pytest.raises(DeviceLost):
            engine.step()
        assert engine.has_work
    else:
        assert [event.request_id for event in events_of(engine)] == ["0", "1", "2"]


def test_without_native_kernels_the_layers_run_and_deterministic_is_refused(monkeypatch):
    monkeypatch.setattr(runner, "supports", lambda *_: False)
    assert isinstance(Engine(random_model([1])).runner.backend, LayersBackend)
    with pytest.raises(ValueError, match="deterministic"):
        Engine(random_model([1, 2]), EngineConfig(deterministic=True))
