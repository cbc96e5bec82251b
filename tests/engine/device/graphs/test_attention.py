"""Calls of the flash kernel, replaced by a slow one that follows PyTorch's documentation."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from nvium_core.engine.device.attention import (
    best_kernels,
    in_place,
    kernel_agrees,
    ragged,
    ragged_agrees,
    ragged_in_place,
    works,
)
from nvium_core.engine.device.paged_cache import PagedCache, best_page_size
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.config import NviumConfig
from nvium_core.model.plan import LayerCall
from tests.engine.schedule.test_sequence import sequence_of
from tests.random_models import small_config

Hidden = Callable[[int], range] | None
"""For a number of keys, those that a faulty kernel does not see. Without it, the mask is causal."""


def slow_varlen_attn(
    q_RHP: Tensor, key: Tensor, value: Tensor, *firsts_and_sizes: Any, hidden: Hidden = None, **given: Any
) -> Tensor:
    """Attend sequence by sequence to the first `seqused_k` keys of its pages. The queries are its last rows."""
    first_query, first_key, *sizes = firsts_and_sizes
    out_RHP = torch.full_like(q_RHP, torch.nan)
    assert given["block_table"].dtype == given["seqused_k"].dtype == first_query.dtype == first_key.dtype == torch.int32
    assert torch.equal(first_key.diff(), given["seqused_k"])
    assert tuple(sizes) == (int(first_query.diff().max()), given["block_table"].shape[1] * key.shape[1])
    left, right = given["window_size"]
    assert (left >= 0 or sizes[0] > 1) == (right == 0)
    for number, (pages, length) in enumerate(zip(given["block_table"], given["seqused_k"].tolist(), strict=True)):
        own = slice(*first_query[number : number + 2].tolist())
        k_HSP, v_HSP = (x[pages].flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))
        q_HQP = q_RHP[own].transpose(0, 1)
        num_rows = q_HQP.shape[1]
        is_seen_QS = torch.ones(num_rows, length, dtype=torch.bool)
        if left >= 0:
            is_seen_QS = is_seen_QS.triu(length - num_rows - left)
        if hidden is None:
            is_seen_QS = is_seen_QS.tril(length - num_rows)
        elif own_hidden := list(hidden(length)):
            is_seen_QS = is_seen_QS.tril(length - num_rows)
            is_seen_QS[:, own_hidden] = False
        is_grouped = given.get("enable_gqa", False)
        answer = F.scaled_dot_product_attention(
            q_HQP, k_HSP, v_HSP, is_seen_QS, scale=given.get("scale"), enable_gqa=is_grouped
        )
        out_RHP[own] = answer.transpose(0, 1)
    return out_RHP


SMALL = small_config([2], width=32)
WINDOWED = small_config([2], width=32, windows=[None, 20], attention_scale=0.2)
"""Heads of size 8."""


def empty_cache(num_pages: int = 3, config: NviumConfig = SMALL, dtype: torch.dtype = torch.float32) -> PagedCache:
    return PagedCache(config, num_pages=num_pages, page_size=8, like=torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize("config", [SMALL, WINDOWED])
@pytest.mark.parametrize("num_pages", [1, 2, 3, 40])
def test_the_kernel_agrees_with_gathering(monkeypatch, num_pages, config):
    monkeypatch.setattr(varlen, "varlen_attn", slow_varlen_attn)
    cache = empty_cache(num_pages, config)
    assert kernel_agrees(cache, config, in_place)
    assert not cache.keys[:, : cache.null_slot + 1].any()
    assert not cache.values[:, : cache.null_slot + 1].any()


def faulty(fault: str, *args: Any, **given: Any) -> Tensor:
    q_RHP, tables, page = args[0], given["block_table"], args[1].shape[1]
    if fault == "rows unwritten":
        out_RHP = slow_varlen_attn(*args, **given)
        out_RHP[1:] = 0
        return out_RHP
    if fault == "table width mistaken":
        given["block_table"] = tables.flatten()[: len(tables)].view(-1, 1).repeat(1, tables.shape[1])
    if fault == "scale forgotten":
        return slow_varlen_attn(q_RHP * q_RHP.shape[-1] ** 0.5, *args[1:], **given)
    if fault in ("own scale forgotten", "window too small", "window too large"):
        left, right = given["window_size"]
        if left >= 0:
            given["window_size"] = (left + {"window too small": -1, "window too large": 1}.get(fault, 0), right)
        if fault == "own scale forgotten":
            given.pop("scale", None)
    hidden: dict[str, Callable[[int], range]] = {
        "newest key": lambda length: range(length - 1, length),
        "page 2": lambda length: range(page, 2 * page if length > 3 * page else page),
        "last page": lambda length: range((length - 1) // page * page if length > page else length, length),
        "split 2 of 4": lambda length: range(length // 4, length // 2 if length > 8 * page else length // 4),
        "no causal mask": lambda length: range(0),
    }
    return slow_varlen_attn(*args, hidden=hidden.get(fault), **given)


FAULTS = ["rows unwritten", "table width mistaken", "scale forgotten", "newest key", "page 2", "last page"]
FAULTS_OF_WINDOWS = ["own scale forgotten", "window too small", "window too large"]
CASES = [(SMALL, fault) for fault in (None, *FAULTS)]
CASES += [(WINDOWED, fault) for fault in (None, *FAULTS, *FAULTS_OF_WINDOWS)]
MULTI_HEAD = small_config([2], width=32, num_key_heads=4)


@pytest.mark.parametrize(("config", "fault"), [*CASES, (SMALL, "split 2 of 4"), (MULTI_HEAD, "split 2 of 4")])
def test_a_faulty_kernel_is_refused(config, fault, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", partial(faulty, fault or ""))
    assert kernel_agrees(empty_cache(40, config, torch.bfloat16), config, in_place) == (fault is None)


@pytest.mark.parametrize(("config", "fault"), [*CASES, (SMALL, "no causal mask")])
def test_a_faulty_kernel_is_refused_for_long_runs(config, fault, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", partial(faulty, fault or ""))
    cache = empty_cache(40, config, torch.bfloat16)
    assert works("flash", partial(ragged_agrees, cache, config, ragged_in_place)) == (fault is None)
    assert not cache.keys.any()


@pytest.mark.parametrize(
    ("num_heads", "num_rows", "window", "num_splits"),
    [(2, 2, None, 1), (2, 1, None, None), (4, 2, None, None), (4, 1, None, None), (4, 2, 5, 1), (4, 1, 5, None)],
)
def test_keys_are_split_only_for_one_row_or_grouped_queries(num_heads, num_rows, window, num_splits, monkeypatch):
    """And with a window, for one row only."""
    asked = []

    def noting(*args: Any, **given: Any) -> Tensor:
        asked.append(given["num_splits"])
        return slow_varlen_attn(*args, **given)

    monkeypatch.setattr(varlen, "varlen_attn", noting)
    cache, rows = empty_cache(), torch.arange(num_rows)
    q_RHP = torch.zeros(num_rows, num_heads, 8)
    in_place(cache, rows[:, None], rows)(q_RHP, LayerCall(0, 0, window=window))
    assert asked == [num_splits]


def test_a_missing_kernel_is_logged_in_one_line(caplog):
    """PyTorch's error lists all devices that have the operator, in about sixty lines."""
    assert not works("flash attention for long runs", partial(ragged_agrees, empty_cache(), SMALL, ragged_in_place))
    (record,) = caplog.records
    assert record.getMessage().startswith("flash attention for long runs is not available: ")
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 300


def test_on_a_cpu_keys_are_gathered_from_small_pages():
    assert best_page_size(torch.zeros(1, dtype=torch.bfloat16)) == 16
    assert best_kernels(empty_cache(), SMALL) is None


def run_of(rows: range, pages: Iterable[int]) -> Rows:
    sequence = sequence_of(rows.stop, 1)
    sequence.pages = [*islice(pages, -(-rows.stop // 8))]
    return Rows(sequence, rows)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=5),
    st.none() | st.integers(1, 30),
    st.integers(0, 99),
)
def test_in_place_attention_of_runs_equals_gathering(lengths, window, seed):
    cache, generator = empty_cache(40), torch.Generator().manual_seed(seed)
    for tensor in (cache.keys, cache.values):
        tensor[:, : cache.null_slot].normal_(generator=generator)
    pages = iter(torch.randperm(40, generator=generator).tolist())
    runs = [run_of(range(before, before + rows), pages) for before, rows in lengths]
    q_RHP = torch.randn(sum(len(run.rows) for run in runs), 4, 8, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", slow_varlen_attn)
        found, expected = (
            read(cache, runs)(q_RHP, LayerCall(0, 0, window=window)) for read in (ragged_in_place, ragged)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
