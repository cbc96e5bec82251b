"""The pillar, where Steps of few rows are static: tokens and exits are Algorithm 1's."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvium_core import Engine, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.graphs.replay import Replay
from nvium_core.engine.device.layers.backend import LayersBackend
from tests.engine.device.graphs.engines import backend_of, graphs_engine
from tests.engine.driving import alone, drained
from tests.engine.test_exactness import Request, check, configs, models, requests, served
from tests.engine.test_whole_pass import Fickle
from tests.random_models import random_model

plain_requests = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 999),
        temperature=st.sampled_from([1.0, 0.7]),
        top_k=st.sampled_from([0, 0, 4]),
        stop_token_ids=st.sampled_from([(), (7,), (3, 5)]),
        ignore_eos=st.booleans(),
    ),
    arrives=st.integers(0, 12),
    is_cancelled=st.none() | st.integers(1, 20),
)


@given(models(), configs, st.lists(requests(), min_size=1, max_size=5), st.booleans())
def test_tokens_and_exits_equal_algorithm_1_whatever_the_schedule(
    model: NviumForCausalLM, config: EngineConfig, plan: list[Request], is_at_once: bool
) -> None:
    engine = graphs_engine(model, replace(config, deterministic=False), is_at_once=is_at_once)
    check(model, served(engine, plan), plan)


@given(models(), configs, st.lists(requests(), min_size=1, max_size=5), st.integers(0, 99))
def test_tokens_and_exits_equal_algorithm_1_however_passes_and_staircases_alternate(
    model: NviumForCausalLM, config: EngineConfig, plan: list[Request], seed: int
) -> None:
    engine = graphs_engine(model, replace(config, deterministic=False))
    engine.scheduler.policy = Fickle(seed)
    check(model, served(engine, plan), plan)


@settings(max_examples=settings().max_examples // 2)
@given(models(), configs, st.lists(plain_requests, min_size=1, max_size=5))
def test_tokens_and_exits_equal_algorithm_1_where_passes_are_launched_ahead(
    model: NviumForCausalLM, config: EngineConfig, plan: list[Request]
) -> None:
    """Plain draws that are stopped, cancelled, preempted and joined by others in the middle."""
    engine = graphs_engine(model, replace(config, deterministic=False, schedule="synchronous"))
    check(model, served(engine, plan), plan)


def test_passes_are_launched_ahead_and_what_stops_leaves_nothing_in_kept_pages() -> None:
    model = random_model([1, 2, 4], seed=3, vocab_size=5, context=64)
    config = EngineConfig(max_sequences=6, schedule="synchronous", page_size=4, cache_tokens=256)
    params = [SamplingParams(max_tokens=40, seed=seed, stop_token_ids=(3,)) for seed in range(12)]
    engine = graphs_engine(model, config)
    for _ in range(2):
        for number, asked in enumerate(params):
            engine.add(str(number), [1, 2, number % 3, 4, 1], asked)
        found = drained(engine)
        for number, asked in enumerate(params):
            expected = alone(model, [1, 2, number % 3, 4, 1], asked)
            told = found[str(number), 0]
            assert (told.token_ids, told.exits) == (expected.token_ids, expected.exits)
    assert engine.pool.num_rows_found > 0
    assert backend_of(engine).passes.num_ahead > 5


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


@pytest.mark.parametrize("schedule", ["sweep", "synchronous"])
def test_a_nucleus_that_is_larger_than_the_candidates_is_drawn_afterwards(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = random_model([1, 2, 4], seed=3), EngineConfig(max_sequences=4, schedule=schedule)
    asked: list[dict[str, Any]] = [{"top_p": 0.5}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 3}, {}]
    engines, told, afterwards = (Engine(model, config), graphs_engine(model, config)), list[object](), list[int]()
    draw = LayersBackend.draw

    def noting(backend: LayersBackend, block: int, x_FD: Tensor, rows: list[int], *more: Any) -> list[int]:
        afterwards.append(len(rows))
        return draw(backend, block, x_FD, rows, *more)

    monkeypatch.setattr(GraphsBackend, "draw", noting)
    for engine in engines:
        for number, wishes in enumerate(asked):
            engine.add(str(number), [1, 2, number], SamplingParams(max_tokens=20, seed=number, **wishes))
        told.append({key: (each.token_ids, each.exits) for key, each in drained(engine).items()})
    assert told[0] == told[1]
    assert 5 < sum(afterwards) < 2 * 20


def test_an_engine_that_is_calibrated_says_the_same() -> None:
    model = random_model([1, 2])
    fresh, calibrated = (graphs_engine(model, EngineConfig(max_sequences=4)) for _ in range(2))
    calibrated.calibrate()
    params = SamplingParams(max_tokens=9, seed=1)
    first, second = ([c.token_ids for c in engine.generate([[1, 2], [3]], params)] for engine in (fresh, calibrated))
    assert first == second


def test_all_graphs_are_captured_before_anybody_is_served(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model([1, 2, 4])
    engine = graphs_engine(model, EngineConfig(max_sequences=4, max_rows_per_step=48))
    backend = backend_of(engine)
    replay = backend.replay = backend.passes.replay = Noting(torch.device("cpu"))
    with caplog.at_level("INFO"):
        engine.runner.prepare(48, 4)
    assert [f"capturing {len(replay.names)} CUDA graphs" in caplog.text, "captured" in caplog.text] == [True, True]
    cache, known = backend.cache, set(replay.names)
    kept = [x[:, : cache.null_slot + 1] for x in (cache.keys, cache.values)]
    assert not any(bool(x.any()) for x in kept)
    for schedule, wishes in ((Fickle(1), {}), (Fickle(2), {"top_k": 3}), (Fickle(3), {"temperature": 0.0})):
        engine.scheduler.policy = schedule
        engine.generate([[1] * 40, [2], [3, 4]], SamplingParams(max_tokens=12, seed=1, **wishes))
    assert set(replay.names) == known


class Noting(Replay):
    """As if it captured."""

    captures = True  # type: ignore[assignment]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.names: dict[Hashable, None] = {}

    def run(self, name: Hashable, function: Callable[[], None]) -> None:
        self.names[name] = None
        function()


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
