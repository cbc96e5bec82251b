"""Tests for a GPU: `python -m pytest -m cuda`. Most also run on a CPU, without capture."""

import warnings
from functools import partial
from itertools import takewhile
from typing import Any

import pytest
import torch

from nvium_core import Completion, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from tests import reference
from tests.engine.device.graphs.engines import graphs_engine
from tests.engine.driving import together
from tests.random_models import random_model

GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
anywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])

PROMPTS = [[1, 2, 3], [4, 5], [6] * 20]
WISHES: list[dict[str, Any]] = [{}, {"top_k": 4, "top_p": 0.8}, {"temperature": 0.0}, {"repetition_penalty": 1.3}]
WISHES += [{"sampling": "mixture"}, {"sampling": "original"}]


def engine_on(device: str, model: NviumForCausalLM, config: EngineConfig) -> Engine:
    """Build an engine in CUDA graphs: of Triton's kernels, or of PyTorch's operators in float64 and on a CPU."""
    is_fused = device == "cuda" and model.dtype != torch.float64
    engine = Engine(model, config) if is_fused else graphs_engine(model, config)
    engine.runner.prepare()
    return engine


def emitted(engine: Engine) -> list[tuple[list[int], list[int]]]:
    return [(each.token_ids, each.exits) for each in answers(engine)]


def answers(engine: Engine) -> list[Completion]:
    prompts = [[(number + 5 * t) % 17 for t in range(1 + number)] for number in range(8)]
    params = [SamplingParams(max_tokens=24, seed=number, ignore_eos=True) for number in range(8)]
    return together(engine, [*zip(prompts, params, strict=True)])


@anywhere
@pytest.mark.parametrize("wishes", WISHES)
def test_tokens_and_exits_equal_algorithm_1_in_float64(wishes, device):
    model = random_model([1, 2, 4], seed=5)
    engine = engine_on(device, random_model([1, 2, 4], seed=5).to(device), EngineConfig(max_sequences=3))
    params = SamplingParams(max_tokens=20, seed=11, ignore_eos=True, **wishes)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        expected = reference.sample(model, prompt, partial(reference.uniform, 11, 0), params)
        assert found.token_ids == [each.token_id for each in expected]
        assert params.sampling == "original" or found.exits == [each.exit for each in expected]
    assert None not in engine.runner.backend.replay.graphs.values()


@anywhere
@pytest.mark.parametrize("num_key_heads", [2, 4])
@pytest.mark.parametrize("schedule", ["sweep", "whole"])
def test_output_in_bfloat16_begins_like_that_of_a_cpu(schedule, num_key_heads, device):
    parts: dict[str, Any] = {"spread": 0.5, "width": 64, "num_key_heads": num_key_heads, "dtype": torch.bfloat16}
    config = EngineConfig(schedule=schedule, max_sequences=8, page_size=256)
    expected = answers(Engine(random_model([1, 2, 4], seed=5, **parts), config))
    engine = engine_on(device, random_model([1, 2, 4], seed=5, **parts).to(device), config)
    num_alike = 0
    for found, other in zip(answers(engine), expected, strict=True):
        pairs = [list(zip(each.token_ids, each.exits, strict=True)) for each in (other, found)]
        alike = len(list(takewhile(lambda both: both[0] == both[1], zip(*pairs, strict=True))))
        assert other.exit_probabilities[:alike] == pytest.approx(found.exit_probabilities[:alike], abs=0.06)
        num_alike += alike
    assert num_alike >= 8 * 4
    assert device == "cpu" or engine.runner.processor == "graphs"
    assert not engine.runner.eager_passes


@anywhere
def test_a_second_engine_of_the_same_model_changes_no_output_of_the_first(device):
    """The first engine's graphs contain the addresses of its packed weights."""
    model, config = random_model([1, 2, 4], seed=5, width=64).to(device), EngineConfig(max_sequences=8)
    first = engine_on(device, model, config)
    before = emitted(first)
    assert emitted(engine_on(device, model, config)) == before
    if device == "cuda":  # overwrites memory that was freed by mistake
        torch.full((2**28,), torch.nan, device=device)
    assert emitted(first) == before


@on_a_gpu
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_decoding_waits_for_the_device_by_events_alone(num_sequences, device):
    model = random_model([1, 2, 4], dtype=torch.bfloat16, width=64).to(device)
    engine = engine_on(device, model, EngineConfig(max_sequences=num_sequences, schedule="whole"))
    for number in range(num_sequences):
        engine.add(str(number), [1, 2, 3], SamplingParams(max_tokens=60, seed=number, ignore_eos=True))
    engine.step()
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its first call in a process warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not [str(wait.message) for wait in waits if "synchroniz" in str(wait.message)]
