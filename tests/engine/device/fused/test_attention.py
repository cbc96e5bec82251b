"""Attention in Triton equals gathering."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core import SamplingParams
from nvium_core.choices import CachePrecision
from nvium_core.engine.device.attention import kernel_agrees, ragged, ragged_agrees
from nvium_core.engine.device.fused.attention import in_tiles, num_splits, ragged_in_tiles
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.plan import LayerCall
from tests.engine.device.graphs.engines import gathered
from tests.random_models import random_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32, torch.float64]
"""Triton's interpreter has no bfloat16, and its compiler no float64 products."""


def filled_cache(
    num_pages: int, page_size: int, num_key_heads: int, dtype: torch.dtype, choice: CachePrecision = "auto"
) -> PagedCache:
    model = random_model([2], dtype=dtype, width=32, num_key_heads=num_key_heads).to(DEVICE)
    sizes = {"num_pages": num_pages, "page_size": page_size}
    cache = PagedCache(model.config, **sizes, like=model.lm_head.weight, choice=choice)
    for tensor in (cache.keys, cache.values):
        tensor[:] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        tensor[:, cache.null_slot] = 0
    return cache


@pytest.mark.parametrize("dtype", DTYPES[: 2 if DEVICE == "cuda" else 3])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize(("page_size", "num_pages"), [(8, 40), (256, 4)])
def test_rows_attend_as_if_gathered(page_size, num_pages, num_key_heads, dtype):
    cache = filled_cache(num_pages, page_size, num_key_heads, dtype)
    table_RW = torch.stack([torch.randperm(num_pages), torch.randperm(num_pages)]).to(DEVICE)
    position_R = torch.tensor([0, num_pages * page_size - 3], device=DEVICE)
    q_RHP = torch.randn(2, 4, 8, device=DEVICE).to(dtype)
    found, expected = (read(cache, table_RW, position_R)(q_RHP, LayerCall(1, 1)) for read in (in_tiles, gathered))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize(("dtype", "choice"), [(torch.float32, "float16"), (torch.float16, "float32")])
def test_a_cache_of_another_precision_is_read_in_that_of_the_queries(dtype, choice):
    cache = filled_cache(40, 8, 2, dtype, choice)
    table_RW, position_R = torch.arange(40, device=DEVICE)[None], torch.tensor([317], device=DEVICE)
    q_RHP = torch.randn(1, 4, 8, device=DEVICE).to(dtype)
    found, expected = (read(cache, table_RW, position_R)(q_RHP, LayerCall(1, 1)) for read in (in_tiles, gathered))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if dtype == torch.float16 else 1e-5)


def test_few_rows_share_their_keys_among_programs_and_many_do_not():
    assert [num_splits(rows * 8, 8192) for rows in (1, 4, 16, 32, 256)] == [32, 8, 2, 1, 1]
    assert num_splits(1, 255) == 1


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=4), st.sampled_from([1, 2, 4]))
def test_runs_attend_as_if_gathered(lengths, num_key_heads):
    cache = filled_cache(40, 8, num_key_heads, torch.float32)
    runs, pages = [], iter(range(40))
    for before, rows in lengths:
        sequence = Sequence("s", [0] * (before + rows), SamplingParams(), seed=0, num_blocks=1, arrival=0)
        sequence.pages = [next(pages) for _ in range(-(-(before + rows) // 8))]
        runs.append(Rows(sequence, range(before, before + rows)))
    q_RHP = torch.randn(sum(rows for _, rows in lengths), 4, 8, device=DEVICE)
    found, expected = (read(cache, runs)(q_RHP, LayerCall(1, 1)) for read in (ragged_in_tiles, ragged))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_key_heads", [2, 4])
def test_the_kernels_pass_the_check_at_the_start(num_key_heads):
    model = random_model([1, 2], dtype=torch.float16, width=32, num_key_heads=num_key_heads).to(DEVICE)
    cache = PagedCache(model.config, num_pages=5, page_size=256, like=model.lm_head.weight)
    assert kernel_agrees(cache, 4, in_tiles)
    assert ragged_agrees(cache, 4, ragged_in_tiles)
