"""The engine on a device that is late: no order of copies, replays and reads relies on luck."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from nvium_core import Completion, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.runner import Runner
from tests.engine.device.graphs.late_device import LateDevice
from tests.engine.driving import Key, drained
from tests.random_models import random_model

KINDS: list[dict[str, object]] = [
    {},
    {"top_k": 3, "top_p": 0.8},
    {"temperature": 0.0},
    {"logprobs": 2},
    {"presence_penalty": 1.0},
    {"sampling": "mixture"},
]


def told(engine: Engine) -> dict[Key, Completion]:
    for number, wishes in enumerate(KINDS):
        prompt = [(3 * number + 5 * t) % 17 for t in range(90 if number == 1 else 7 + number)]
        params = SamplingParams(max_tokens=8, seed=number, ignore_eos=True, **wishes)  # type: ignore[arg-type]
        engine.add(str(number), prompt, params)
    return drained(engine)


def late_engine(
    model: NviumForCausalLM, config: EngineConfig, device: LateDevice, make_fence: Callable[[torch.device], Fence]
) -> Engine:
    device.take(*model.parameters(), *model.buffers())
    make_backend = partial(GraphsBackend, light_head_bytes=0, make_fence=make_fence)
    engine = Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))
    backend = engine.runner.backend
    assert isinstance(backend, GraphsBackend)
    device.give_to_host(backend.inputs.host, backend.told)
    device.takes_all = False
    return engine


def plain_answers(config: EngineConfig) -> dict[Key, Completion]:
    engine = Engine(model_of(), config, make_runner=partial(Runner, make_backend=LayersBackend))
    return told(engine)


def model_of() -> NviumForCausalLM:
    return random_model([1, 2, 4], seed=6, context=128)


def test_answers_are_those_of_the_layers() -> None:
    """With Steps of more rows than fit, which go through the layers between those that are replayed."""
    config = EngineConfig(schedule="sweep", max_sequences=6, max_rows_per_step=100, chunk_rows=100)
    expected = plain_answers(config)
    model = model_of()
    with LateDevice() as device:
        found = told(late_engine(model, config, device, device.fence))
    assert device.num_executed > 1000
    assert found.keys() == expected.keys()
    for key, completion in found.items():
        assert (completion.token_ids, completion.exits) == (expected[key].token_ids, expected[key].exits)
        logprobs = [score.logprob for score in expected[key].scores]
        assert [score.logprob for score in completion.scores] == pytest.approx(logprobs, abs=1e-10)
