"""What is asked of the flash kernel, answered by a slow one that does what PyTorch's documentation says."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_core.engine.device import attention
from nvium_core.engine.device.attention import best_attention, gathered, kernel_agrees
from nvium_core.engine.device.paged_cache import PagedCache, best_page_size
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
