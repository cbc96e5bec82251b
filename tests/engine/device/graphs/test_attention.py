"""What is asked of the flash kernel, answered by a slow one that does what PyTorch's documentation says."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nvium_core import SamplingParams
from nvium_core.engine.device import attention, paged_cache
from nvium_core.engine.device.attention import (
    RowAttention,
    alike,
    best_attention,
    best_ragged,
    by_length,
    first_that_agrees,
    gathered,
    in_place,
    kernel_agrees,
    page_by_page,
    ragged,
    ragged_in_place,
)
from nvium_core.engine.device.paged_cache import PagedCache, best_page_size
from nvium_core.engine.device.sampling import Truncation, draw
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run
from nvium_core.model.llama import dense_attention
from tests.random_models import random_model


def slow_varlen_attn(
    q_RHP: Tensor, key: Tensor, value: Tensor, first_query: Tensor, first_key: Tensor, *sizes: int, **given: Any
) -> Tensor:
    """Sequence by sequence: the first `seqused_k` keys of the pages that its row of the block table names, of which
    each of its queries, the last of them, sees those up to itself."""
    out_RHP = torch.full_like(q_RHP, torch.nan)
    assert given["block_table"].dtype == given["seqused_k"].dtype == first_query.dtype == first_key.dtype == torch.int32
    assert torch.equal(first_key.diff(), given["seqused_k"])
    assert sizes == (int(first_query.diff().max()), given["block_table"].shape[1] * key.shape[1])
    assert given["window_size"] == ((-1, -1) if sizes[0] == 1 else (-1, 0))
    for number, (pages, length) in enumerate(zip(given["block_table"], given["seqused_k"].tolist(), strict=True)):
        own = slice(*first_query[number : number + 2].tolist())
        k_HSP, v_HSP = (x[pages].flatten(0, 1)[:length].transpose(0, 1) for x in (key, value))
        q_HQP = q_RHP[own].transpose(0, 1)
        num_rows = q_HQP.shape[1]
        is_seen_QS = torch.ones(num_rows, length, dtype=torch.bool).tril(length - num_rows)
        is_grouped = given["enable_gqa"]
        answer = F.scaled_dot_product_attention(q_HQP, k_HSP, v_HSP, is_seen_QS, enable_gqa=is_grouped)
        out_RHP[own] = answer.transpose(0, 1)
    return out_RHP


def empty_cache(num_pages: int = 3) -> PagedCache:
    model = random_model([2], dtype=torch.float32, width=32)
    return PagedCache(model.config, num_pages=num_pages, page_size=8, like=model.lm_head.weight)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 40])
def test_the_kernel_is_asked_for_what_gathering_gives(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    monkeypatch.setattr(attention, "varlen_attn", slow_varlen_attn)
    cache = empty_cache(num_pages)
    assert kernel_agrees(cache, 4, in_place)
    assert not cache.keys[:, : cache.null_slot + 1].any()
    assert not cache.values[:, : cache.null_slot + 1].any()


def test_gathering_asks_no_kernel_that_plans_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def noted(*args: Any, **given: Any) -> Tensor:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return dense_attention(*args, **given)

    monkeypatch.setattr(paged_cache, "dense_attention", noted)
    cache = empty_cache(2)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert kernel_agrees(cache, 4, gathered)
    assert asked == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_kernel_that_leaves_rows_unwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, **given: Any) -> Tensor:
        out_RHP = slow_varlen_attn(*args, **given)
        out_RHP[1:] = 0
        return out_RHP

    monkeypatch.setattr(attention, "varlen_attn", forgetful)
    assert not kernel_agrees(empty_cache(), 4, in_place)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 40])
def test_long_runs_read_keys_in_place_where_that_agrees_with_gathering(
    monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    def without_causal_mask(*args: Any, **given: Any) -> Tensor:
        out_RHP = slow_varlen_attn(*args, **given)
        out_RHP[0] = out_RHP[-1]
        return out_RHP

    cache = empty_cache(num_pages)
    monkeypatch.setattr(attention, "varlen_attn", slow_varlen_attn)
    assert best_ragged(cache, 4, in_place) is ragged_in_place
    assert best_ragged(cache, 4, gathered) is best_ragged(cache, 4, page_by_page) is ragged
    assert not cache.keys[:, : cache.null_slot + 1].any()
    monkeypatch.setattr(attention, "varlen_attn", without_causal_mask)
    assert best_ragged(cache, 4, in_place) is ragged
    monkeypatch.setattr(attention, "varlen_attn", None)
    assert best_ragged(cache, 4, in_place) is ragged


def test_that_a_kernel_does_not_exist_here_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch says for which devices it does, on some sixty."""
    assert best_ragged(empty_cache(), 4, in_place) is ragged
    (record,) = caplog.records
    assert record.getMessage().startswith("long runs cannot read keys in place here: ")
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 300


def test_on_a_cpu_keys_are_gathered_from_small_pages() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert best_page_size(like) == 16
    assert best_attention(empty_cache(), num_heads=4) is gathered


def test_a_kernel_that_mistakes_the_width_of_tables_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(*args: Any, **given: Any) -> Tensor:
        tables = given["block_table"]
        given["block_table"] = tables.flatten()[: len(tables)].view(-1, 1).repeat(1, tables.shape[1])
        return slow_varlen_attn(*args, **given)

    monkeypatch.setattr(attention, "varlen_attn", narrow)
    assert not kernel_agrees(empty_cache(), 4, in_place)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=5), st.integers(0, 99))
def test_runs_of_any_length_read_pages_in_place_as_they_are_gathered(lengths: list[tuple[int, int]], seed: int) -> None:
    cache, generator = empty_cache(40), torch.Generator().manual_seed(seed)
    cache.keys[:, : cache.null_slot], cache.values[:, : cache.null_slot] = (
        torch.randn(2, cache.null_slot, *cache.keys.shape[2:], generator=generator) for _ in range(2)
    )
    pages = iter(torch.randperm(40, generator=generator).tolist())
    runs = []
    for before, rows in lengths:
        sequence = Sequence("s", [0] * (before + rows), SamplingParams(), seed=0, num_blocks=1, arrival=0)
        sequence.pages = [next(pages) for _ in range(-(-(before + rows) // 8))]
        runs.append(Run(sequence, range(before, before + rows), reaches_front=True))
    slot_R = torch.from_numpy(cache.slots(runs))
    q_RHP, k_RGP, v_RGP = (torch.randn(len(slot_R), heads, 8, generator=generator) for heads in (4, 2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attn", slow_varlen_attn)
        found = ragged_in_place(cache, runs, slot_R)(q_RHP, k_RGP, v_RGP, 0)
    torch.testing.assert_close(found, ragged(cache, runs, slot_R)(q_RHP, k_RGP, v_RGP, 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 40])
def test_a_kernel_without_tables_is_asked_for_pages_one_by_one(monkeypatch: pytest.MonkeyPatch, num_pages: int) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", slow_flash_attention)
    assert kernel_agrees(empty_cache(num_pages), 4, page_by_page)


def slow_flash_attention(
    q_XHP: Tensor,
    key: Tensor,
    value: Tensor,
    first_query: Tensor,
    first_key: Tensor,
    *sizes: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
) -> tuple[Tensor, Tensor, None]:
    """Sequence by sequence of one query each: from its first key on, the first `seqused_k`. Where there are none the
    answer is 0, and the sum's logarithm infinite."""
    assert sizes == (1, 8, 0.0, False, False)
    assert (window_size_left, window_size_right) == (-1, 0)
    assert first_query.dtype == first_key.dtype == seqused_k.dtype == torch.int32
    assert first_query.tolist() == [*range(len(q_XHP) + 1)]
    num_heads = q_XHP.shape[1]
    out_XHP, log_sum_HX = torch.zeros_like(q_XHP), torch.full((num_heads, len(q_XHP)), torch.inf)
    pairs = zip(first_key[:-1].tolist(), seqused_k.tolist(), strict=True)
    for number, (first, used) in enumerate(pairs):
        if used:
            k_SHP, v_SHP = (x[first : first + used].repeat_interleave(num_heads // x.shape[1], 1) for x in (key, value))
            score_HS = torch.einsum("hp,shp->hs", q_XHP[number], k_SHP) * q_XHP.shape[-1] ** -0.5
            out_XHP[number] = torch.einsum("hs,shp->hp", score_HS.softmax(-1), v_SHP)
            log_sum_HX[:, number] = score_HS.logsumexp(-1)
    return out_XHP, log_sum_HX, None


SPLIT = partial(in_place, num_splits=None)


@pytest.mark.parametrize("working", [[SPLIT, in_place, page_by_page], [in_place, page_by_page], [page_by_page], []])
@pytest.mark.parametrize("fails", [False, True])
def test_the_best_way_that_agrees_is_chosen(
    monkeypatch: pytest.MonkeyPatch, working: list[RowAttention], fails: bool
) -> None:
    def agrees(cache: PagedCache, num_heads: int, way: RowAttention) -> bool:
        is_working = described(way) in map(described, working)
        if fails and not is_working:
            raise TypeError("an unknown argument")
        return is_working

    monkeypatch.setattr(attention, "kernel_agrees", agrees)
    chosen = first_that_agrees(empty_cache(), num_heads=4)
    expected = by_length if working == [in_place, page_by_page] else [*working, gathered][0]
    assert described(chosen) == described(expected)


def test_few_rows_of_long_contexts_go_page_by_page_where_they_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", slow_flash_attention)
    assert kernel_agrees(empty_cache(40), 4, by_length)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
    monkeypatch.setattr(attention, "varlen_attn", slow_varlen_attn)
    assert kernel_agrees(empty_cache(15), 4, by_length)


def described(way: RowAttention) -> tuple[object, ...]:
    return (way.func, *way.keywords.items()) if isinstance(way, partial) else (way,)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_sum_along_a_single_row_is_left_to_chance(device: str) -> None:
    """CUDA shares `cumsum` of a single row among processors in an order that varies."""
    logits_RV, one = torch.zeros(1, 50, dtype=torch.float64, device=device), torch.ones(1, device=device)
    with SingleRows() as seen:
        draw(logits_RV, Truncation(one, -one, one.long(), one / 2, is_ranked=True), one / 2)
    assert seen.num_calls == 2
    assert seen.num_single == (2 if device == "cpu" else 0)


class SingleRows(TorchDispatchMode):
    num_calls = num_single = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum.default:
            self.num_calls += 1
            self.num_single += args[0].numel() == args[0].shape[args[1]]
        return func(*args, **(kwargs or {}))


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
