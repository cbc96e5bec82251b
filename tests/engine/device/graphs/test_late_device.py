"""The engine on a device that is late: no order of copies, replays and reads relies on luck."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nvium_core import Completion, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.layers.fixed_order import FixedOrderBackend
from nvium_core.engine.device.runner import Runner
from tests.engine.device.graphs.engines import backend_of
from tests.engine.device.graphs.late_device import LateDevice
from tests.engine.device.graphs.test_meta_device import ORIGINALS
from tests.engine.driving import Key, drained
from tests.engine.test_original import Whims
from tests.random_models import random_model

KINDS: list[dict[str, object]] = [
    {},
    {"top_k": 3, "top_p": 0.8},
    {"temperature": 0.0},
    {"logprobs": 2},
    {"presence_penalty": 1.0},
    {"sampling": "mixture"},
]


def told(engine: Engine, kinds: list[dict[str, object]] = KINDS) -> dict[Key, Completion]:
    for number, wishes in enumerate(kinds):
        prompt = [(3 * number + 5 * t) % 17 for t in range(90 if number == 1 else 7 + number)]
        params = SamplingParams(max_tokens=8, seed=number, ignore_eos=True, **wishes)  # type: ignore[arg-type]
        engine.add(str(number), prompt, params)
    return drained(engine)


def late_engine(
    model: NviumForCausalLM, config: EngineConfig, device: LateDevice, make_fence: Callable[[torch.device], Fence]
) -> Engine:
    device.take(*model.parameters(), *model.buffers())
    make_backend = partial(GraphsBackend, light_head_bytes=0, num_candidates=4, make_fence=make_fence)
    engine = Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))
    backend = engine.runner.backend
    assert isinstance(backend, GraphsBackend)
    device.give_to_host(backend.inputs.host, backend.told, *backend.passes.told)
    device.takes_all = False
    return engine


def plain_answers(config: EngineConfig, kinds: list[dict[str, object]] = KINDS) -> dict[Key, Completion]:
    engine = Engine(model_of(), config, make_runner=partial(Runner, make_backend=LayersBackend))
    return told(engine, kinds)


def model_of(drafter_width: int = 0) -> NviumForCausalLM:
    return random_model([1, 2, 4], seed=6, context=128, drafter_hidden_size=drafter_width)


STAIRCASES = EngineConfig(schedule="sweep", max_sequences=6, max_rows_per_step=100, chunk_rows=100)
"""With runs that are too long for the buffers, which go through the layers between those that are replayed."""

PASSES = replace(STAIRCASES, schedule="synchronous")
PLAIN: list[dict[str, object]] = [{}, {}, {"top_k": 3, "top_p": 0.8}, {"stop_token_ids": (3, 5)}]

RANKED: list[dict[str, object]] = [{}, {"top_p": 0.6}, {"top_p": 0.8}]
"""Four candidates are enough for some tokens of theirs."""

SCORED: list[dict[str, object]] = [{"logprobs": 2}, {"logprobs": 0}, {}, {"logprobs": 1, "top_k": 3}]

MANY = EngineConfig(schedule="synchronous", max_sequences=80, max_rows_per_step=200, chunk_rows=100)


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (STAIRCASES, KINDS),
        (STAIRCASES, RANKED),
        (PASSES, KINDS),
        (PASSES, PLAIN),
        (PASSES, RANKED),
        (PASSES, SCORED),
        (MANY, PLAIN * 19 + KINDS[2:]),
    ],
    ids=["staircases", "ranked", "passes", "passes ahead", "ranked passes", "scored passes ahead", "many"],
)
def test_answers_are_those_of_the_layers(config: EngineConfig, kinds: list[dict[str, object]]) -> None:
    expected = plain_answers(config, kinds)
    model = model_of()
    with LateDevice() as device:
        engine = late_engine(model, config, device, device.fence)
        found = told(engine, kinds)
    assert device.num_executed > 1000
    assert backend_of(engine).passes.num_ahead >= (3 if kinds in (PLAIN, SCORED) else 0)
    check_alike(found, expected)


@pytest.mark.parametrize("config", [STAIRCASES, PASSES], ids=["staircases", "passes"])
def test_what_is_drafted_and_verified_is_that_of_the_layers(config: EngineConfig) -> None:
    expected = originals_told(Engine(model_of(8), config, make_runner=partial(Runner, make_backend=LayersBackend)))
    model = model_of(8)
    with LateDevice() as device:
        found = originals_told(late_engine(model, config, device, device.fence))
    assert device.num_executed > 1000
    assert {exit_ for completion in expected.values() for exit_ in completion.exits} > {3}
    check_alike(found, expected)


def originals_told(engine: Engine) -> dict[Key, Completion]:
    engine.scheduler.drafting = Whims(3, seed=1)
    return told(engine, ORIGINALS)


@pytest.mark.parametrize("config", [STAIRCASES, PASSES], ids=["staircases", "passes"])
def test_sums_of_a_fixed_order_are_those_of_the_layers(config: EngineConfig) -> None:
    config = replace(config, deterministic=True)
    expected, model = plain_answers(config), model_of()
    with LateDevice() as device:
        device.take(*model.parameters(), *model.buffers())
        engine = Engine(model, config, make_runner=partial(Runner, make_backend=FixedOrderBackend))
        device.takes_all = False
        found = told(engine)
    assert device.num_executed > 1000
    check_alike(found, expected)


WITHOUT: dict[str, dict[str, Any]] = {
    "inputs are packed before the last have left": {"deaf_fences": [0]},
    "a pass's answers are read before they have come": {"deaf_fences": [1, 2]},
    "a Step's answers are read before they have come": {"waits_for_copies": False},
    "values are read before they are there": {"waits_for_reads": False},
}


@pytest.mark.parametrize("wait", WITHOUT)
def test_each_wait_that_is_left_out_is_noticed(wait: str) -> None:
    """In one of the runs above."""
    noticed = []
    for config, kinds in ((STAIRCASES, KINDS), (PASSES, PLAIN)):
        expected, model = plain_answers(config, kinds), model_of()
        with LateDevice(**WITHOUT[wait]) as device:
            try:
                check_alike(told(late_engine(model, config, device, device.fence), kinds), expected)
            except (AssertionError, IndexError, RuntimeError, ValueError, OverflowError) as error:
                noticed.append(error)
    assert noticed


def check_alike(found: dict[Key, Completion], expected: dict[Key, Completion]) -> None:
    assert found.keys() == expected.keys()
    for key, completion in found.items():
        assert (completion.token_ids, completion.exits) == (expected[key].token_ids, expected[key].exits)
        logprobs = [score.logprob for score in expected[key].scores]
        assert [score.logprob for score in completion.scores] == pytest.approx(logprobs, abs=1e-10)
