"""The engine on a simulated asynchronous device: copies, replays and reads are correctly ordered."""

from dataclasses import replace
from typing import Any

import pytest

from nvium_core import Completion, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.paged_cache import PagedCache
from tests.engine.device.graphs.engines import PlainGraphs
from tests.engine.device.graphs.late_device import LateDevice
from tests.engine.device.graphs.test_exactness import KINDS
from tests.engine.driving import Key, Layers, drained, engine_on
from tests.random_models import random_model

PLAIN: list[dict[str, Any]] = [{}, {}, {"top_k": 3}, {"stop_token_ids": (3, 5)}, {"temperature": 0.0}]
SWEEP = EngineConfig(schedule="sweep", max_sequences=8, max_rows_per_step=100, chunk_rows=100)
"""Some runs are too long for the graphs and use the layers between replays."""

WHOLE = replace(SWEEP, schedule="whole")


def answers(engine: Engine, kinds: list[dict[str, Any]]) -> dict[Key, Completion]:
    for number, wishes in enumerate(kinds):
        prompt = [(3 * number + 5 * t) % 17 for t in range(90 if number == 1 else 7 + number)]
        engine.add(str(number), prompt, SamplingParams(max_tokens=8, seed=number, ignore_eos=True, **wishes))
    return drained(engine)


def late_answers(config: EngineConfig, kinds: list[dict[str, Any]], device: LateDevice) -> dict[Key, Completion]:
    def make_backend(model: NviumForCausalLM, cache: PagedCache, config: EngineConfig) -> PlainGraphs:
        backend = PlainGraphs(model, cache, device.fence)
        device.give_to_host(*(each for host in backend.host_buffers for each in (host.inputs, host.answers)))
        return backend

    model = model_of()
    with device:
        device.take(*model.parameters(), *model.buffers())
        engine = engine_on(make_backend, model, config)
        device.takes_all = False
        return answers(engine, kinds)


def model_of() -> NviumForCausalLM:
    return random_model([1, 2, 4], seed=6, context=128)


@pytest.mark.parametrize("config", [SWEEP, WHOLE], ids=["sweep", "whole"])
@pytest.mark.parametrize("kinds", [KINDS, PLAIN], ids=["all", "plain"])
def test_output_equals_that_of_the_layers(config, kinds):
    device = LateDevice()
    check_alike(late_answers(config, kinds, device), answers(engine_on(Layers, model_of(), config), kinds))
    assert device.num_executed > 1000


WITHOUT: dict[str, dict[str, Any]] = {
    "even passes": {"deaf_fences": [0]},
    "odd passes": {"deaf_fences": [1]},
    "values read by the layers": {"waits_for_reads": False},
}


@pytest.mark.parametrize("wait", WITHOUT)
def test_a_missing_wait_is_detected(wait):
    detected = []
    for config, kinds in ((SWEEP, KINDS), (WHOLE, PLAIN)):
        expected = answers(engine_on(Layers, model_of(), config), kinds)
        try:
            check_alike(late_answers(config, kinds, LateDevice(**WITHOUT[wait])), expected)
        except (AssertionError, IndexError, RuntimeError, ValueError, OverflowError) as error:
            detected.append(error)
    assert detected


def check_alike(found: dict[Key, Completion], expected: dict[Key, Completion]) -> None:
    assert found.keys() == expected.keys()
    for key, completion in found.items():
        assert completion.token_ids == expected[key].token_ids
        assert KINDS[int(key[0])].get("sampling") == "original" or completion.exits == expected[key].exits
        logprobs = [score.logprob for score in expected[key].scores]
        assert [score.logprob for score in completion.scores] == pytest.approx(logprobs, abs=1e-10)
