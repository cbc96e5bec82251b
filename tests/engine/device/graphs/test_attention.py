"""What is asked of the flash kernel, answered by a slow one that does what PyTorch's documentation says."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from nvium_core import SamplingParams
from nvium_core.engine.device import attention
from nvium_core.engine.device.attention import alike, best_attention, gathered, kernel_agrees
from nvium_core.engine.device.paged_cache import PagedCache, best_page_size
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run
from tests.random_models import random_model


def slow_varlen_attn(
    q_RHP: Tensor, key: Tensor, value: Tensor, first_query: Tensor, first_key: Tensor, *sizes: int, **given: Any
) -> Tensor:
    """Sequence by sequence: the first `seqused_k` keys of the pages that its row of the block table names."""
    out_RHP = torch.full_like(q_RHP, torch.nan)
    assert given["block_table"].dtype == given["seqused_k"].dtype == first_query.dtype == first_key.dtype == torch.int32
    assert torch.equal(first_key.diff(), given["seqused_k"])
    assert sizes == (1, given["block_table"].shape[1] * key.shape[1])
    for number, (pages, length) in enumerate(zip(given["block_table"], given["seqused_k"].tolist(), strict=True)):
        own = slice(*first_query[number : number + 2].tolist())
        k_HSP, v_HSP = (x[pages].flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))
        q_HQP = q_RHP[own].transpose(0, 1)
        answer = F.scaled_dot_product_attention(q_HQP, k_HSP, v_HSP, enable_gqa=given["enable_gqa"])
        out_RHP[own] = answer.transpose(0, 1)
    return out_RHP


def empty_cache() -> PagedCache:
    model = random_model([2], dtype=torch.float32, width=32)
    return PagedCache(model.config, num_pages=3, page_size=8, like=model.lm_head.weight)


def test_the_kernel_is_asked_for_what_gathering_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", slow_varlen_attn)
    cache = empty_cache()
    assert kernel_agrees(cache, num_heads=4)
    assert not cache.keys[:, : cache.null_slot + 1].any()
    assert not cache.values[:, : cache.null_slot + 1].any()


def test_a_kernel_that_leaves_rows_unwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, **given: Any) -> Tensor:
        out_RHP = slow_varlen_attn(*args, **given)
        out_RHP[1:] = 0
        return out_RHP

    monkeypatch.setattr(attention, "varlen_attn", forgetful)
    assert not kernel_agrees(empty_cache(), num_heads=4)


def test_on_a_cpu_keys_are_gathered_from_small_pages() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert best_page_size(like) == 16
    assert best_attention(empty_cache(), num_heads=4) is gathered


def test_a_kernel_that_mistakes_the_width_of_tables_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(*args: Any, **given: Any) -> Tensor:
        tables = given["block_table"]
        given["block_table"] = tables.flatten()[: len(tables)].view(-1, 1).repeat(1, 2)
        return slow_varlen_attn(*args, **given)

    monkeypatch.setattr(attention, "varlen_attn", narrow)
    assert not kernel_agrees(empty_cache(), num_heads=4)


def test_a_long_context_does_not_pad_short_ones() -> None:
    """64 sequences of 200 tokens beside one of 30,000."""
    runs = []
    for length in [200] * 64 + [30_000]:
        sequence = Sequence("s", [0] * length, SamplingParams(), seed=0, num_blocks=1, arrival=0)
        runs.append(Run(sequence, range(length - 1, length), reaches_front=True))
    batches = [[runs[number].rows.stop for number in numbers] for numbers in alike(runs, page_size=16)]
    assert sorted(map(len, batches)) == [1, 64]
    assert sum(len(batch) * max(batch) for batch in batches) == 64 * 200 + 30_000


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 40)), min_size=1, max_size=30))
def test_no_short_run_is_padded_to_more_than_twice_its_pages(lengths: list[tuple[int, int]]) -> None:
    runs = []
    for length, rows in lengths:
        sequence = Sequence("s", [0] * length, SamplingParams(), seed=0, num_blocks=1, arrival=0)
        runs.append(Run(sequence, range(max(0, length - rows), length), reaches_front=True))
    numbers = [list(batch) for batch in alike(runs, page_size=16)]
    assert sorted(number for batch in numbers for number in batch) == list(range(len(runs)))
    for batch in numbers:
        pages = [-(-runs[number].rows.stop // 16) for number in batch]
        assert max(pages) <= 2 * min(pages)
        assert len(batch) == 1 or max(len(runs[number].rows) for number in batch) <= MAX_SHORT_RUN
