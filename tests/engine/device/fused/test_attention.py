"""Attention in Triton equals gathering."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.choices import CachePrecision
from nvium_core.engine.device.attention import kernels_agree, ragged
from nvium_core.engine.device.fused.layers import KEY_BLOCK, MIN_SPLIT_KEYS, in_tiles, num_splits, ragged_in_tiles
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.plan import LayerCall
from tests.engine.device.graphs.engines import gathered
from tests.engine.schedule.test_sequence import sequence_of
from tests.random_models import small_config

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32, torch.float64]
"""Triton's interpreter has no bfloat16, and its compiler no float64 products."""


def filled_cache(
    num_pages: int, page_size: int, num_key_heads: int, dtype: torch.dtype, choice: CachePrecision = "auto"
) -> PagedCache:
    config, like = small_config([2], width=32, num_key_heads=num_key_heads), torch.zeros(1, dtype=dtype, device=DEVICE)
    cache = PagedCache(config, num_pages=num_pages, page_size=page_size, like=like, choice=choice)
    for tensor in (cache.keys, cache.values):
        tensor[:] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        tensor[:, cache.null_slot] = 0
    return cache


def check_rows(cache: PagedCache, call: LayerCall) -> None:
    """Compare rows at the first, a middle and one of the last positions of a table of all pages."""
    num_pages, dtype = cache.null_page, cache.states_NSD.dtype
    table_RW = torch.stack([torch.randperm(num_pages) for _ in range(3)]).to(DEVICE)
    position_R = torch.tensor([0, cache.null_slot // 2, cache.null_slot - 3], device=DEVICE)
    q_RHP = torch.randn(3, 4, 8, device=DEVICE).to(dtype)
    found, expected = (read(cache, table_RW, position_R)(q_RHP, call) for read in (in_tiles, gathered))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if dtype == torch.float16 else 1e-5)


PAGES = pytest.mark.parametrize(("page_size", "num_pages"), [(8, 40), (256, 4)])


@PAGES
@pytest.mark.parametrize("dtype", DTYPES[: 2 if DEVICE == "cuda" else 3])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_rows_attend_as_if_gathered(page_size, num_pages, num_key_heads, dtype):
    cache = filled_cache(num_pages, page_size, num_key_heads, dtype)
    check_rows(cache, LayerCall(1, 1))
    check_rows(cache, LayerCall(1, 1, scale=0.7, cap=2.0, window=40))


@PAGES
@pytest.mark.parametrize("window", [1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * MIN_SPLIT_KEYS + 1])
def test_a_row_attends_to_its_window(page_size, num_pages, window):
    """The largest window is split among programs."""
    check_rows(filled_cache(num_pages, page_size, 2, torch.float32), LayerCall(1, 1, window=window))


@pytest.mark.parametrize("window", [None, KEY_BLOCK + 1])
@pytest.mark.parametrize(("dtype", "choice"), [(torch.float32, "float16"), (torch.float16, "float32")])
def test_a_cache_of_another_precision_is_read_in_that_of_the_queries(dtype, choice, window):
    check_rows(filled_cache(40, 8, 2, dtype, choice), LayerCall(1, 1, window=window))


@pytest.mark.parametrize("rows", [range(317, 318), range(300, 318)])
def test_blocks_of_keys_in_front_of_the_window_are_not_read(rows):
    cache, call, window = filled_cache(40, 8, 2, torch.float32), LayerCall(1, 1, window=40), 40
    run = run_of(rows, range(40))
    q_RHP = torch.randn(len(rows), 4, 8, device=DEVICE)
    expected = ragged(cache, [run])(q_RHP, call)
    for tensor in (cache.keys, cache.values):
        tensor[:, : (rows.start + 1 - window) // KEY_BLOCK * KEY_BLOCK] = torch.nan
    torch.testing.assert_close(ragged_in_tiles(cache, [run])(q_RHP, call), expected, rtol=0, atol=1e-5)


def test_few_rows_share_their_keys_among_programs_and_many_do_not():
    assert [num_splits(rows * 8, 8192) for rows in (1, 4, 16, 32, 256)] == [32, 8, 2, 1, 1]
    assert num_splits(1, 255) == 1


def run_of(rows: range, pages: Iterable[int]) -> Rows:
    sequence = sequence_of(rows.stop, 1)
    sequence.pages = [*islice(pages, -(-rows.stop // 8))]
    return Rows(sequence, rows)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.none() | st.integers(1, 70),
)
def test_runs_attend_as_if_gathered(lengths, num_key_heads, window):
    cache, pages = filled_cache(40, 8, num_key_heads, torch.float32), iter(range(40))
    runs = [run_of(range(before, before + rows), pages) for before, rows in lengths]
    q_RHP = torch.randn(sum(rows for _, rows in lengths), 4, 8, device=DEVICE)
    found, expected = (read(cache, runs)(q_RHP, LayerCall(1, 1, window=window)) for read in (ragged_in_tiles, ragged))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


PARTS: list[dict[str, Any]] = [
    {},
    {"num_key_heads": 4},
    {"windows": [None, 600], "attention_scale": 0.1, "attention_cap": 5.0},
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_the_kernels_pass_the_check_at_the_start(parts):
    config = small_config([1, 2], width=32, **parts)
    cache = PagedCache(config, num_pages=3, page_size=256, like=torch.zeros(1, dtype=torch.float16, device=DEVICE))
    assert kernels_agree(cache, config, in_tiles, ragged_in_tiles)
