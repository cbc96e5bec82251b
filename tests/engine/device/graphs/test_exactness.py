"""With `GraphsBackend`, tokens and exits equal Algorithm 1's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import EngineConfig, FailureEvent, SamplingParams
from nvium_core.engine.device.graphs import backend as graphs_backend
from nvium_core.engine.device.graphs.backend import Graph
from nvium_core.engine.device.graphs.replay import Replay
from tests.engine.automaton import Automaton, Rule
from tests.engine.device.graphs.engines import graphs_engine
from tests.engine.driving import alone, events_of, together
from tests.engine.test_exactness import Request, check, configs, models, requests, served
from tests.random_models import random_model

plain_requests = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 999),
        sampling=st.sampled_from(["exits", "exits", "mixture"]),
        temperature=st.sampled_from([1.0, 0.7, 0.0]),
        top_k=st.sampled_from([0, 0, 4]),
        stop_token_ids=st.sampled_from([(), (7,), (3, 5)]),
        ignore_eos=st.booleans(),
    ),
    arrives=st.integers(0, 12),
    is_cancelled=st.none() | st.integers(1, 20),
)


@given(models(), configs, st.lists(requests(), min_size=1, max_size=5))
def test_tokens_and_exits_equal_algorithm_1_whatever_the_schedule(model, config, plan):
    check(model, served(graphs_engine(model, config), plan), plan)


@settings(max_examples=settings().max_examples // 2)
@given(models(), configs, st.lists(plain_requests, min_size=1, max_size=5))
def test_tokens_and_exits_equal_algorithm_1_where_passes_are_launched_ahead(model, config, plan):
    """Requests without scores, constraints or penalties, which stop, are cancelled or preempted."""
    check(model, served(graphs_engine(model, config), plan), plan)


def test_passes_launched_ahead_do_not_change_shared_pages(monkeypatch):
    monkeypatch.setattr("nvium_core.engine.schedule.scheduler.SECONDS_AHEAD", 60.0)
    model = random_model([1, 2, 4], seed=3, vocab_size=5, context=64)
    config = EngineConfig(max_sequences=6, schedule="whole", page_size=4, cache_tokens=256)
    params = [SamplingParams(max_tokens=40, seed=seed, stop_token_ids=(3,)) for seed in range(12)]
    engine = graphs_engine(model, config)
    for _ in range(2):
        plan = [([1, 2, number % 3, 4, 1], asked) for number, asked in enumerate(params)]
        for (prompt, asked), completion in zip(plan, together(engine, plan), strict=True):
            expected = alone(model, prompt, asked)
            assert (completion.token_ids, completion.exits) == (expected.token_ids, expected.exits)
    assert engine.pool.num_rows_found > 0
    assert max(engine.runner.backend.most_emitted) > 1


@pytest.mark.parametrize(("seconds", "most_emitted"), [(60.0, [7, 7, 2, 1]), (0.0, [1] * 17)])
def test_a_pass_stays_in_flight_between_steps_and_none_runs_twice(seconds, most_emitted, monkeypatch):
    monkeypatch.setattr("nvium_core.engine.schedule.scheduler.SECONDS_AHEAD", seconds)
    engine = graphs_engine(random_model([1, 2, 4], seed=3), EngineConfig(max_sequences=2, schedule="whole"))
    backend, launched, in_flight = engine.runner.backend, list[object](), list[bool]()
    replay = backend.replay.run
    monkeypatch.setattr(backend.replay, "run", lambda name, function: (launched.append(name), replay(name, function)))
    for number, prompt in enumerate([[1, 2], [3]]):
        engine.add(str(number), prompt, SamplingParams(max_tokens=17, seed=1, ignore_eos=True))
    while engine.has_work:
        engine.step()
        in_flight.append(backend._carried is not None)
    assert backend.most_emitted == most_emitted
    assert in_flight == [True] * (len(in_flight) - 1) + [False]
    assert len(launched) == 17


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"sampling": "mixture"},
    {"sampling": "original", "top_k": 3},
    {"top_p": 0.6},
    {"logprobs": 2},
    {"presence_penalty": 1.0, "logit_bias": {3: 1.0}, "min_tokens": 2},
    {"constraint": Automaton(Rule(1, 17, 5, 3, 1.0))},
]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
@pytest.mark.parametrize("schedule", ["sweep", "whole"])
def test_every_kind_of_request_runs_in_graphs_captured_before_serving(schedule, seconds, monkeypatch):
    """Without time for all graphs, the largest one serves all."""
    monkeypatch.setattr(graphs_backend, "CAPTURE_SECONDS", seconds)
    model = random_model([1, 2, 4])
    engine = graphs_engine(model, EngineConfig(max_sequences=8, schedule=schedule))
    backend = engine.runner.backend
    replay = backend.replay = Recording()
    engine.runner.prepare()
    captured = set(replay.names)
    assert len({name.variant for name in captured}) == len(backend.variants)
    assert len(backend.variants) == (1 if seconds == 0 else 52)
    assert not any(bool(x[:, : backend.cache.null_slot].any()) for x in (backend.cache.keys, backend.cache.values))
    plan = [([1, 2, n], SamplingParams(max_tokens=9, seed=n, **wishes)) for n, wishes in enumerate(KINDS)]
    found = together(engine, plan)
    assert [each.token_ids for each in found] == [alone(model, *asked).token_ids for asked in plan]
    assert set(replay.names) == captured
    assert not engine.runner.eager_passes


def test_passes_outside_the_graphs_are_counted_by_their_cause_and_logged_once(caplog):
    model = random_model([1, 2, 4])
    engine = graphs_engine(model, EngineConfig())
    engine.runner.backend.max_changes = 4
    plan = [
        ([1, 2], SamplingParams(max_tokens=12, seed=1, presence_penalty=1.0, ignore_eos=True)),
        ([3] * 20, SamplingParams(max_tokens=2, seed=1)),
    ]
    with caplog.at_level("INFO"):
        found = together(engine, plan)
    assert [each.token_ids for each in found] == [alone(model, *asked).token_ids for asked in plan]
    causes = ["more than 16 rows of a prompt", "more than 4 changed logits"]
    assert sorted(engine.runner.eager_passes) == causes
    assert engine.runner.eager_passes[causes[1]] > 1
    assert sorted(each.getMessage().rpartition(": ")[2] for each in caplog.records) == causes


class Recording(Replay):
    """Records the names of functions instead of capturing them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captures = True
        self.names: dict[Graph, None] = {}

    def capture(self, name: Graph, function: Callable[[], None]) -> bool:
        self.run(name, function)
        return True

    def run(self, name: Graph, function: Callable[[], None]) -> None:
        self.names[name] = None
        function()


@pytest.mark.parametrize("schedule", ["sweep", "whole"])
@pytest.mark.parametrize("part", ["router", "head"])
def test_a_model_with_nans_fails_its_sequences(part, schedule):
    model = random_model([1, 2])
    weight = model.get_parameter("lm_head.weight" if part == "head" else "exits.0.router.head.weight")
    with torch.no_grad():
        weight.fill_(torch.nan)
    engine = graphs_engine(model, EngineConfig(max_sequences=2, schedule=schedule))
    engine.add("broken", [1, 2], SamplingParams(seed=0))
    assert [type(event) for event in events_of(engine)] == [FailureEvent]
