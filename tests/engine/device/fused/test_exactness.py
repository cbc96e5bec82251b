"""With Triton's kernels, tokens and exits of every kind of request equal Algorithm 1's in float64."""

from dataclasses import replace

import pytest
import torch

from nvium_core import Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.attention import ragged, works
from nvium_core.engine.device.fused.layers import FusedLayers
from nvium_core.engine.device.graphs.backend import GraphsBackend
from nvium_core.engine.device.paged_cache import PagedCache
from tests.engine.device.graphs.test_exactness import KINDS as KINDS_WITH_CHANGES
from tests.engine.device.native.calls import KINDS
from tests.engine.driving import Layers, alone, engine_on, together
from tests.engine.test_exactness import MAKES, fields_of
from tests.random_models import random_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's compiler has no float64 products"),
]


class FewChanges(GraphsBackend):
    max_changes = 64


def fused_backend(model: NviumForCausalLM, cache: PagedCache) -> GraphsBackend:
    return FewChanges(model, cache, FusedLayers(model, cache).run, ragged)


def fused_engine(model: NviumForCausalLM, config: EngineConfig) -> Engine:
    return engine_on(lambda model, cache, _: fused_backend(model, cache), model, replace(config, deterministic=False))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sweep", "whole"])
@pytest.mark.parametrize("kinds", [KINDS, KINDS_WITH_CHANGES], ids=["plain", "changes"])
def test_every_kind_of_token_equals_algorithm_1(kinds, schedule):
    model = random_model([1, 2, 4], seed=5)
    plan = [([1, 2, n], SamplingParams(max_tokens=4, seed=n, ignore_eos=True, **kind)) for n, kind in enumerate(kinds)]
    engine = fused_engine(model, EngineConfig(max_sequences=8, schedule=schedule))
    for (prompt, each), found in zip(plan, together(engine, plan), strict=True):
        expected = alone(model, prompt, each)
        assert (found.token_ids, found.exits) == (expected.token_ids, expected.exits)


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("make", [*MAKES, BIASES], ids=str)
def test_every_entry_of_a_plan_gives_the_scores_of_the_layers(make):
    """A prompt that is longer than the windows, and one that is shorter. Their angles are float32."""
    model = random_model([2, 4], seed=5, **fields_of(make | {"num_loops": 1 + make.get("norms_loops", False)}, 4))
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, logprobs=0, prompt_logprobs=True)
    config = EngineConfig(max_sequences=2, page_size=4, schedule="whole")
    engines = fused_engine(model, config), engine_on(Layers, model, config)
    pairs = zip(*(together(engine, [([*range(12)], params), ([3], params)]) for engine in engines), strict=True)
    for pair in pairs:
        found, expected = ([score.logprob for score in each.prompt_scores + each.scores] for each in pair)
        assert found == pytest.approx(expected, abs=1e-5)
    assert not engines[0].runner.eager_passes


@pytest.mark.parametrize("choice", ["float32", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_pass_writes_and_reads_a_cache_of_another_precision(dtype, choice):
    model = random_model([1, 2], seed=5, dtype=dtype)
    cache = PagedCache(model.config, num_pages=4, page_size=16, like=model.lm_head.weight, choice=choice)
    assert fused_backend(model, cache).agrees()


@pytest.mark.parametrize("exits", [[2], [1, 2]])
def test_a_faulty_kernel_leaves_the_pass_to_the_layers(exits, monkeypatch, caplog):
    model = random_model(exits, seed=5)
    cache = PagedCache(model.config, num_pages=4, page_size=16, like=model.lm_head.weight)
    assert fused_backend(model, cache).agrees()
    assert not any(bool(x[..., :64, :, :].any()) for x in (cache.keys, cache.values))
    monkeypatch.setattr(FusedLayers, "_activate", lambda self, mlp, call, x_RD: mlp.up_proj(x_RD))
    assert not works("the fused pass", fused_backend(model, cache).agrees)
    assert "the fused pass gives wrong results" in caplog.text
