"""The pillar, where Steps of few rows are static: tokens and exits are Algorithm 1's."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import Engine, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams
from tests.engine.device.graphs.engines import graphs_engine
from tests.engine.driving import drained
from tests.engine.test_exactness import Request, check, configs, models, requests, served
from tests.random_models import random_model


@given(models(), configs, st.lists(requests(), min_size=1, max_size=5), st.booleans())
def test_tokens_and_exits_equal_algorithm_1_whatever_the_schedule(
    model: NviumForCausalLM, config: EngineConfig, plan: list[Request], is_at_once: bool
) -> None:
    engine = graphs_engine(model, replace(config, deterministic=False), is_at_once=is_at_once)
    check(model, served(engine, plan), plan)


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 3, 9])
def test_plain_requests_draw_what_they_draw_elsewhere(num_sequences: int, is_at_once: bool) -> None:
    model = random_model([1, 2, 4], seed=3)
    config = EngineConfig(max_sequences=num_sequences)
    params = [SamplingParams(max_tokens=20, seed=s, top_k=s % 3, temperature=0.5 + s / 9) for s in range(num_sequences)]
    told = []
    for engine in (Engine(model, config), graphs_engine(model, config, is_at_once=is_at_once)):
        for number, asked in enumerate(params):
            engine.add(str(number), [1, 2, 3, number], asked)
        told.append({key: (each.token_ids, each.exits) for key, each in drained(engine).items()})
    assert told[0] == told[1]


def test_an_engine_that_is_calibrated_says_the_same() -> None:
    model = random_model([1, 2])
    fresh, calibrated = (graphs_engine(model, EngineConfig(max_sequences=4)) for _ in range(2))
    calibrated.calibrate()
    params = SamplingParams(max_tokens=9, seed=1)
    first, second = ([c.token_ids for c in engine.generate([[1, 2], [3]], params)] for engine in (fresh, calibrated))
    assert first == second


@pytest.mark.parametrize("part", ["router", "head"])
def test_a_model_that_is_broken_fails_its_sequences(part: str) -> None:
    model = random_model([1, 2])
    weight = model.lm_head.weight if part == "head" else model.exits[0].router.head.weight
    with torch.no_grad():
        weight.fill_(torch.nan)
    engine = graphs_engine(model, EngineConfig(max_sequences=2))
    engine.add("broken", [1, 2], SamplingParams(seed=0))
    events = [event for _ in range(5) for event in engine.step()]
    assert [type(event) for event in events] == [FailureEvent]
