"""With `GraphsBackend`, tokens and exits equal Algorithm 1's."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Completion, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.attention import ragged
from nvium_core.engine.device.graphs import backend as graphs_backend
from nvium_core.engine.device.graphs import capture
from nvium_core.engine.device.graphs.backend import Flight, Graph, GraphsBackend
from nvium_core.engine.device.graphs.capture import Replay
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.step import Rows
from tests.engine.automaton import Automaton, Rule
from tests.engine.device.graphs.engines import PlainLayers, graphs_engine
from tests.engine.driving import alone, engine_on, events_of, together
from tests.engine.test_exactness import Request, check, configs, models, requests, served
from tests.engine.test_schedules import Fickle
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
def test_tokens_and_exits_equal_algorithm_1_where_passes_are_launched_asynchronously(model, config, plan):
    """Requests without scores, constraints or penalties, which stop, are cancelled or preempted."""
    check(model, served(graphs_engine(model, config), plan), plan)


def test_passes_launched_ahead_do_not_change_shared_pages(monkeypatch):
    model = random_model([1, 2, 4], seed=3, vocab_size=5, context=64)
    config = EngineConfig(max_sequences=6, schedule="whole", page_size=4, cache_tokens=256)
    params = [SamplingParams(max_tokens=40, seed=seed, stop_token_ids=(3,)) for seed in range(12)]
    engine = graphs_engine(model, config)
    backend, launched, taken = engine.runner.backend, list[Flight](), list[Flight]()
    launch, take = backend._launch_async, backend._take_answers
    monkeypatch.setattr(backend, "_launch_async", lambda *given: launched.append(launch(*given)) or launched[-1])
    monkeypatch.setattr(backend, "_take_answers", lambda flight, parts: taken.append(flight) or take(flight, parts))
    for _ in range(2):
        plan = [([1, 2, number % 3, 4, 1], asked) for number, asked in enumerate(params)]
        for (prompt, asked), completion in zip(plan, together(engine, plan), strict=True):
            expected = alone(model, prompt, asked)
            assert (completion.token_ids, completion.exits) == (expected.token_ids, expected.exits)
    assert engine.pool.num_rows_found > 0
    assert {any(flight is used for used in taken) for flight in launched[:-1]} == {True, False}


@pytest.mark.parametrize("num_requests", [1, 7])
def test_a_pass_stays_in_flight_whoever_arrives_or_ends_and_no_row_runs_twice(num_requests, monkeypatch):
    """Prompts of up to five chunks arrive while other sequences decode. Some end with a stop token."""
    model = random_model([1, 2, 4], seed=3, context=256)
    engine = graphs_engine(model, EngineConfig(max_sequences=4, schedule="whole", chunk_rows=32))
    backend, launched = engine.runner.backend, Counter[tuple[str, int]]()
    launch = backend._launch

    def counted(blocks: range, rows: Sequence[Rows], *others: Any) -> Flight | None:
        launched.update((sequence.request_id, row) for sequence, own in rows for row in own)
        return launch(blocks, rows, *others)

    monkeypatch.setattr(backend, "_launch", counted)
    prompts = [[(n + t) % 17 for t in range(1 + 25 * n)] for n in range(num_requests)]
    params = [SamplingParams(max_tokens=17 + n, seed=n, stop_token_ids=(3,) * (n % 2)) for n in range(num_requests)]
    found = [Completion() for _ in prompts]
    for now in range(200):
        if now % 4 == 0 and now // 4 < num_requests:
            engine.add(str(now // 4), prompts[now // 4], params[now // 4])
        for event in engine.step():
            found[int(event.request_id)].append(event)
        engine.check_integrity()
        assert not engine.has_work or backend._async_flight is not None
    expected = [alone(model, *asked).token_ids for asked in zip(prompts, params, strict=True)]
    assert [each.token_ids for each in found] == expected
    assert len({each.finish_reason for each in found}) == min(num_requests, 2)
    assert max(launched.values()) == 1


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
    assert len(backend.variants) == (1 if seconds == 0 else 68)
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
    penalised = SamplingParams(max_tokens=12, seed=1, presence_penalty=1.0, ignore_eos=True)
    plan = [([1, 2], penalised), ([3] * 20, SamplingParams(max_tokens=2, seed=1))]
    with caplog.at_level("INFO"):
        found = together(engine, plan)
    assert [each.token_ids for each in found] == [alone(model, *asked).token_ids for asked in plan]
    causes = ["more than 16 rows of a prompt", "more than 4 changed logits"]
    assert sorted(engine.runner.eager_passes) == causes
    assert engine.runner.eager_passes[causes[1]] > 1
    assert sorted(each.getMessage().rpartition(": ")[2] for each in caplog.records) == causes


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_decisions_compile_before_the_capture_while_there_is_time(seconds, monkeypatch, caplog):
    """Those of plain requests come first, for one row and for many."""
    kinds = dict[tuple[bool, int], None]()

    def compiled_fake(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            if not backend.replay.names:
                kinds[given[-1].mixes, given[-1].num_rows] = None
            return function(*given)

        return noted

    monkeypatch.setattr(capture, "compile_once", compiled_fake)
    monkeypatch.setattr(graphs_backend, "COMPILE_SECONDS", seconds)
    engine = engine_on(compiling_backend, random_model([1, 2, 4]), EngineConfig(max_sequences=2))
    backend = engine.runner.backend
    backend.replay = Recording()
    engine.runner.prepare()
    assert [*kinds] == [(False, 1), (False, 32), (True, 1), (True, 32)][: 4 if seconds else 0]
    assert ("for lack of time" in caplog.text) == (seconds == 0)
    assert backend.replay.names


def compiling_backend(model: NviumForCausalLM, cache: PagedCache, config: EngineConfig) -> GraphsBackend:
    return GraphsBackend(model, cache, PlainLayers(model, cache).run, ragged, compiles=True)


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


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_launched_ahead_knows_the_exits_that_its_fronts_have_passed(seed):
    """Whole passes of few rows follow sweeps, so that a front waits between two exits for one."""
    model = random_model([1, 2, 4], seed=3, context=64)
    engine = graphs_engine(model, EngineConfig(schedule="race", max_rows_per_step=2))
    engine.scheduler.schedules = Fickle(seed)
    plan = [([1, 2, number], SamplingParams(max_tokens=30, seed=number)) for number in range(4)]
    for asked, completion in zip(plan, together(engine, plan), strict=True):
        assert completion.exit_probabilities == pytest.approx(alone(model, *asked).exit_probabilities, abs=1e-12)
