"""With `deterministic`, results are bit-identical whatever else runs, in any precision."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import Completion, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from tests.engine.device.native.compiling import needs_compiler
from tests.engine.driving import together
from tests.engine.test_exactness import configs
from tests.random_models import random_model

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]

PRECISIONS = [(torch.float32, cache) for cache in ("auto", "bfloat16", "float16")]
PRECISIONS += [(torch.bfloat16, cache) for cache in ("auto", "float32")]
"""Of the model and of the cache."""

pytestmark = needs_compiler


def model_of(dtype: torch.dtype, seed: int = 5) -> NviumForCausalLM:
    return random_model([1, 2, 3], seed=seed, width=32, num_heads=4, num_key_heads=2, context=64, dtype=dtype)


Request = tuple[list[int], SamplingParams]


def plan_of(num_requests: int) -> list[Request]:
    """Prompts of many lengths, most with a common prefix."""
    plan = list[Request]()
    for number, logprobs in zip(range(num_requests), cycle([None, None, 2]), strict=False):
        params = SamplingParams(max_tokens=20, seed=number, temperature=number % 3 / 2, ignore_eos=True)
        plan.append(([*PREFIX[: 14 - number % 4], number, *range(number)], replace(params, logprobs=logprobs)))
    return plan


def one_by_one(model: NviumForCausalLM, plan: list[Request], config: EngineConfig) -> Iterator[Completion]:
    precise = {"deterministic": True, "page_size": config.page_size, "cache_dtype": config.cache_dtype}
    config = EngineConfig(schedule="whole", prefix_caching=False, **precise)
    for prompt, params in plan:
        (completion,) = Engine(model, config).generate([prompt], params)
        yield completion


@pytest.mark.parametrize(("dtype", "cache_dtype"), PRECISIONS)
@pytest.mark.parametrize("schedule", ["race", "sweep", "whole"])
def test_concurrent_requests_change_no_bit(dtype, cache_dtype, schedule):
    model, plan = model_of(dtype), plan_of(8)
    limits = {"cache_tokens": 128, "page_size": 4, "max_rows_per_step": 24, "chunk_rows": 5, "max_sequences": 5}
    config = EngineConfig(schedule=schedule, deterministic=True, cache_dtype=cache_dtype, **limits)
    crowd = together(engine := Engine(model, config), plan)
    assert engine.admission.num_preemptions > 0
    assert engine.pool.num_rows_found > 0
    assert min(exit_ for completion in crowd for exit_ in completion.exits) < 3
    assert crowd == list(one_by_one(model, plan, config))


EXPECTED: dict[object, list[Completion]] = {}
"""By precisions and page size, as attention sums the keys of a page together."""


@settings(max_examples=settings().max_examples // 10)
@given(st.sampled_from(PRECISIONS), configs, st.permutations(range(6)))
def test_no_limit_and_no_order_changes_a_bit(precisions, config, order):
    dtype, cache_dtype = precisions
    config = replace(config, deterministic=True, cache_tokens=96, cache_dtype=cache_dtype)
    model, plan = model_of(dtype), plan_of(6)
    key = precisions, config.page_size
    if key not in EXPECTED:
        EXPECTED[key] = list(one_by_one(model, plan, config))
    completions = together(Engine(model, config), [plan[number] for number in order])
    assert completions == [EXPECTED[key][number] for number in order]
