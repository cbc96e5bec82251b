"""Where bits are promised, they are the same whatever else runs, in any precision."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nvium_core import Completion, Engine, EngineConfig, NviumForCausalLM, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.device import native
from nvium_core.engine.device.attention import gathered, ragged
from nvium_core.engine.device.layers.fixed_order import (
    KEYS_PER_SPLIT,
    TILE_SIZES,
    fixed_order,
    rows_are_independent,
    tile_size,
    tiles,
)
from nvium_core.engine.device.paged_cache import PagedCache, positions
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step
from tests.engine.driving import drained
from tests.random_models import random_model

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]

precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Native calls, or the layers in a fixed order."""
    if request.param == "layers":
        monkeypatch.setattr(native, "knows", lambda *_: False)
    elif native.native_library() is None:
        pytest.skip("no C++ compiler here")
    return str(request.param)


ways = pytest.mark.parametrize("way", ["native", "layers"], indirect=True)


def model_of(dtype: torch.dtype, seed: int = 5) -> NviumForCausalLM:
    return random_model([1, 2, 3], seed=seed, width=32, num_heads=4, num_key_heads=2, context=64, dtype=dtype)


Request = tuple[list[int], SamplingParams]


def plan_of(num_requests: int) -> list[Request]:
    """Prompts of all lengths, most of which share a beginning."""
    prompts = [[*PREFIX[: 14 - number % 4], number, *range(number)] for number in range(num_requests)]
    return [
        (
            prompt,
            SamplingParams(max_tokens=20, seed=number, temperature=number % 3 / 2, ignore_eos=True, logprobs=scores),
        )
        for number, (prompt, scores) in enumerate(zip(prompts, cycle([None, None, 2]), strict=False))
    ]


def together(model: NviumForCausalLM, config: EngineConfig, plan: list[Request]) -> tuple[list[Completion], Engine]:
    engine = Engine(model, config)
    for number, (prompt, params) in enumerate(plan):
        engine.add(str(number), prompt, params)
    told = drained(engine)
    return [told[str(number), 0] for number in range(len(plan))], engine


def one_by_one(model: NviumForCausalLM, plan: list[Request], page_size: int) -> Iterator[Completion]:
    config = EngineConfig(schedule="synchronous", deterministic=True, prefix_caching=False, page_size=page_size)
    for prompt, params in plan:
        (completion,) = Engine(model, config).generate([prompt], params)
        yield completion


@precisions
@ways
@pytest.mark.parametrize("schedule", ["optimal", "sweep", "synchronous"])
def test_a_crowd_changes_no_bit_of_an_answer(dtype: torch.dtype, schedule: Schedule, way: str) -> None:
    model, plan = model_of(dtype), plan_of(8)
    config = EngineConfig(
        schedule=schedule,
        deterministic=True,
        cache_tokens=128,
        page_size=4,
        max_rows_per_step=24,
        chunk_rows=5,
        max_sequences=5,
    )
    crowd, engine = together(model, config, plan)
    assert engine.scheduler.num_preemptions > 0
    assert engine.pool.num_rows_found > 0
    assert min(exit_ for completion in crowd for exit_ in completion.exits) < 3
    assert crowd == list(one_by_one(model, plan, page_size=4))


configs = st.builds(
    EngineConfig,
    schedule=st.sampled_from(["optimal", "sweep", "synchronous"]),
    max_sequences=st.integers(1, 6),
    max_rows_per_step=st.integers(3, 40),
    chunk_rows=st.integers(2, 16),
    page_size=st.integers(2, 9),
    cache_tokens=st.integers(64, 128),
    deterministic=st.just(True),
)

EXPECTED: dict[tuple[torch.dtype, int, str], list[Completion]] = {}
"""By precision, page size and way: a page's keys are summed together."""


@ways
@settings(max_examples=settings().max_examples // 10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([torch.float32, torch.bfloat16]), configs, st.permutations(range(6)))
def test_no_limit_and_no_order_changes_a_bit(
    way: str, dtype: torch.dtype, config: EngineConfig, order: list[int]
) -> None:
    model, plan, page_size = model_of(dtype), plan_of(6), config.page_size or 0
    key = dtype, page_size, way
    if key not in EXPECTED:
        EXPECTED[key] = list(one_by_one(model, plan, page_size))
    completions, _ = together(model, config, [plan[number] for number in order])
    assert completions == [EXPECTED[key][number] for number in order]


@ways
def test_fixed_order_means_the_same_as_any_order(way: str) -> None:
    model, plan = model_of(torch.float64), plan_of(6)
    fixed, _ = together(model, EngineConfig(deterministic=True), plan)
    free, _ = together(model, EngineConfig(), plan)
    assert [(c.token_ids, c.exits) for c in fixed] == [(c.token_ids, c.exits) for c in free]


@ways
def test_scores_are_the_same_in_fixed_order(way: str) -> None:
    model, plan = model_of(torch.float64), plan_of(4)
    scored = [(prompt, replace(params, logprobs=2, prompt_logprobs=True)) for prompt, params in plan]
    fixed, _ = together(model, EngineConfig(deterministic=True), scored)
    free, _ = together(model, EngineConfig(), scored)
    for one, other in zip(fixed, free, strict=True):
        assert [score.logprob for score in one.scores] == pytest.approx([score.logprob for score in other.scores])


def run_of(rows: range, pages: list[int]) -> Run:
    sequence = Sequence("s", [0] * rows.stop, SamplingParams(), seed=0, num_blocks=3, arrival=0)
    sequence.pages = pages
    return Run(sequence, rows, reaches_front=True)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16), st.data())
def test_tiles_hold_every_row_once_and_in_order(lengths: list[int], num_rows: int, data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, length - 1)) for length in lengths]
    runs = [run_of(range(start, length), []) for start, length in zip(starts, lengths, strict=True)]
    parts = list(tiles(Step(1, runs), num_rows))
    divided = [(run.sequence, row) for part in parts for run in part.runs for row in run.rows]
    assert divided == [(run.sequence, row) for run in runs for row in run.rows]
    assert [part.num_rows for part in parts[:-1]] == [num_rows] * (len(parts) - 1)
    assert 1 <= parts[-1].num_rows <= num_rows
    assert all(part.block == 1 and all(run.rows for run in part.runs) for part in parts)


class Crowded(nn.Linear):
    """A product whose rows depend on their number, as those of real kernels may."""

    largest_independent = 4

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_RD) + (0 if len(x_RD) <= self.largest_independent else x_RD.sum())


class Uneven(nn.Linear):
    """A product whose rows depend on where they stand."""

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_RD) + torch.arange(len(x_RD))[:, None]


@torch.inference_mode()
def test_rows_that_look_at_each_other_or_at_their_place_are_noticed() -> None:
    assert rows_are_independent(nn.Linear(8, 8).double(), 1)
    assert rows_are_independent(Crowded(8, 8), 4)
    assert not rows_are_independent(Crowded(8, 8), 8)
    assert rows_are_independent(Uneven(8, 8), 1)
    assert not rows_are_independent(Uneven(8, 8), 2)


@precisions
def test_a_tile_is_as_large_as_the_most_sensitive_product_allows(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    products = [module for module in model.model.layers[0].modules() if isinstance(module, nn.Linear)]
    assert tile_size(model) in TILE_SIZES
    products[0].__class__ = Crowded
    assert tile_size(model) <= Crowded.largest_independent


@pytest.mark.parametrize("lengths", [[1], [5, 9], [3, KEYS_PER_SPLIT, KEYS_PER_SPLIT + 1], [2 * KEYS_PER_SPLIT + 40]])
def test_attention_run_by_run_row_by_row_and_in_splits_is_the_same(lengths: list[int]) -> None:
    model = random_model([1], width=16, num_heads=4, num_key_heads=2, context=512)
    generator = torch.Generator().manual_seed(0)
    page_size, num_pages = 8, 64
    free = iter(torch.randperm(num_pages, generator=generator).tolist())
    runs = [run_of(range(length), [next(free) for _ in range(-(-length // page_size))]) for length in lengths]
    q_RHP, k_RGP, v_RGP = (
        torch.randn(sum(lengths), heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    out = []
    for rows_alone in (None, gathered, fixed_order):
        cache = PagedCache(model.config, num_pages=num_pages, page_size=page_size, like=model.lm_head.weight)
        slot_R, position_R = torch.from_numpy(cache.slots(runs)), torch.from_numpy(positions(runs))
        if rows_alone is None:
            attend = ragged(cache, runs, slot_R)
        else:
            table_RW = torch.from_numpy(cache.tables(runs)).repeat_interleave(torch.tensor(lengths), 0)
            attend = rows_alone(cache, table_RW, position_R, slot_R)
        out.append(attend(q_RHP, k_RGP, v_RGP, 0))
    for other in out[1:]:
        assert torch.allclose(other, out[0], rtol=0, atol=1e-12)
