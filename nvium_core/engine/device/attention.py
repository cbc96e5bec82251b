"""Attention over the paged cache: every row's key and value are written, then it sees its sequence up to itself.

`gathered` copies the pages into a padded tensor: any device, any precision, and the reference for the others.
`in_place` has the flash kernel read the pages where they are: half precision on CUDA, pages of multiples of 256.
`page_by_page` does so where PyTorch's kernel takes no tables (before 2.12).
`ragged` and `ragged_in_place` are for runs of several rows.
`layers.fixed_order` has sums of a fixed order.

Shapes: R rows of a Step, B runs (rows of one sequence that attend together), Q rows of the longest run, W pages of a
table, S = W · page size keys, H query heads, G key heads, P head size.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from textwrap import shorten
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from nvium_core.engine.device.paged_cache import HALF, KERNEL_PAGE_SIZE, Integers, PagedCache
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run
from nvium_core.model.llama import Attend

logger = logging.getLogger(__name__)

MAX_GATHERED_KEYS = 65_536
"""Of all runs together, which bounds the memory that gathering takes."""

MAX_PAIRS = 4096
"""Of rows and pages, which bounds what is attended to page by page: every row once for each page of the widest table.
As many as 512 rows with the narrowest tables have."""

MAX_SAID = 200
"""Characters of what a kernel that does not work says."""

FEW_ROWS, MANY_PAGES = 8, 16
"""So few rows of so long tables keep less than half of an H100's processors busy where contexts are not split: a
processor for each key head of a row. Assumed, not measured."""

RunAttention = Callable[[PagedCache, Items[Run], Tensor], Attend]
"""(cache, runs, cache slots [R]) → attention in which rows of a run see those before them."""

RowAttention = Callable[[PagedCache, Tensor, Tensor, Tensor], Attend]
"""(cache, page tables [R, W], positions [R], cache slots [R]) → attention in which every row is a run of its own."""


def gathered(cache: PagedCache, table_RW: Tensor, position_R: Tensor, slot_R: Tensor) -> Attend:
    lookup = Lookup.of(cache, table_RW, position_R[:, None])

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.write(layer, slot_R, k_RGP, v_RGP)
        return cache.attend(q_RHP[:, None], *lookup, layer)[:, 0]

    return attend


class Lookup(NamedTuple):
    """slot_BS: the cache slots of each run's keys. mask_B1QS: True where a query may see a key."""

    slot_BS: Tensor
    mask_B1QS: Tensor

    @classmethod
    def of(cls, cache: PagedCache, table_BW: Tensor, position_BQ: Tensor) -> "Lookup":
        """Keys beyond a run's last row are the null slot's, so that no other's NaN gets through the mask."""
        within_page = torch.arange(cache.page_size, device=table_BW.device)
        slot_BS = (table_BW[:, :, None] * cache.page_size + within_page).flatten(1)
        key_S = torch.arange(slot_BS.shape[1], device=table_BW.device)
        slot_BS = slot_BS.where(key_S <= position_BQ[:, -1:], cache.null_slot)
        return cls(slot_BS, (key_S <= position_BQ[:, :, None])[:, None])


def ragged(cache: PagedCache, runs: Items[Run], slot_R: Tensor) -> Attend:
    """`gathered` for runs of any length, in batches of similar ones."""
    batches = [batch(cache, runs, numbers, slot_R.device) for numbers in alike(runs, cache.page_size)]

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.write(layer, slot_R, k_RGP, v_RGP)
        out_RHP = torch.empty_like(q_RHP)
        for each in batches:
            out_BQHP = cache.attend(q_RHP[each.row_BQ], *each.lookup, layer)
            out_RHP[each.rows] = out_BQHP.flatten(0, 1)[each.places]
        return out_RHP

    return attend


class Batch(NamedTuple):
    """Runs that attend in one call; shorter ones repeat their last row.

    row_BQ: rows of the Step. places: flat [B · Q] places of those that are no repetition, and rows: which these are.
    """

    row_BQ: Tensor
    lookup: Lookup
    places: Tensor
    rows: Tensor


def alike(runs: Items[Run], page_size: int) -> Iterable[list[int]]:
    """Long runs alone, short ones with those of about as many keys: none is padded to more than twice its own."""
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        is_long = len(run.rows) > MAX_SHORT_RUN
        batches[number if is_long else -1, power_of_two(-(-run.rows.stop // page_size))].append(number)
    return batches.values()


def batch(cache: PagedCache, runs: Items[Run], numbers: list[int], device: torch.device) -> Batch:
    first_rows = np.cumsum([0, *(len(run.rows) for run in runs)])
    members = [runs[number] for number in numbers]
    last_B1 = np.array([[len(run.rows) - 1] for run in members])
    start_B1 = np.array([[run.rows.start] for run in members])
    every_Q = np.arange(last_B1.max() + 1)
    place_BQ = np.minimum(every_Q, last_B1)
    row_BQ = first_rows[numbers][:, None] + place_BQ
    is_own_BQ = every_Q <= last_B1
    row, table, position, places, rows = sent(
        device, row_BQ, cache.tables(members), start_B1 + place_BQ, np.flatnonzero(is_own_BQ), row_BQ[is_own_BQ]
    )
    return Batch(row, Lookup.of(cache, table, position), places, rows)


def sent(device: torch.device, *arrays: Integers) -> list[Tensor]:
    """Whole numbers to the device, in one copy."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def in_place(
    cache: PagedCache, table_RW: Tensor, position_R: Tensor, slot_R: Tensor, *, num_splits: int | None = 1
) -> Attend:
    """By the flash kernel. `num_splits` None lets it share a long context among the GPU's processors."""
    first_query = torch.arange(len(position_R) + 1, dtype=torch.int32, device=position_R.device)
    return flash(cache, table_RW, position_R + 1, slot_R, first_query, max_queries=1, num_splits=num_splits)


def ragged_in_place(cache: PagedCache, runs: Items[Run], slot_R: Tensor, *, num_splits: int | None = 1) -> Attend:
    """`in_place` for runs of any length: every row sees its sequence up to itself."""
    lengths = [len(run.rows) for run in runs]
    first_query, num_keys = np.cumsum([0, *lengths]), np.array([run.rows.stop for run in runs])
    table_BW, num_keys_B, first_query_B = sent(slot_R.device, cache.tables(runs), num_keys, first_query)
    return flash(
        cache, table_BW, num_keys_B, slot_R, first_query_B.int(), max_queries=max(lengths), num_splits=num_splits
    )


def flash(
    cache: PagedCache,
    table_BW: Tensor,
    num_keys_B: Tensor,
    slot_R: Tensor,
    first_query: Tensor,
    *,
    max_queries: int,
    num_splits: int | None,
) -> Attend:
    tables, used_B = table_BW.int(), num_keys_B.int()
    first_key = torch.cat([first_query[:1], used_B.cumsum(0, dtype=torch.int32)])
    max_keys = table_BW.shape[1] * cache.page_size
    pages = (-1, cache.page_size)

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.write(layer, slot_R, k_RGP, v_RGP)
        out_RHP = varlen_attn(
            q_RHP,
            cache.keys[layer].unflatten(0, pages),
            cache.values[layer].unflatten(0, pages),
            first_query,
            first_key,
            max_queries,
            max_keys,
            window_size=(-1, 0) if max_queries > 1 else (-1, -1),  # a bound turns off grouped queries' fast path
            enable_gqa=q_RHP.shape[1] != k_RGP.shape[1],
            seqused_k=used_B,
            block_table=tables,
            num_splits=num_splits,
        )
        assert isinstance(out_RHP, Tensor)
        return out_RHP

    return attend


def page_by_page(cache: PagedCache, table_RW: Tensor, position_R: Tensor, slot_R: Tensor) -> Attend:
    """By the flash kernel without page tables: every page is attended to by itself, as if it were a sequence, and its
    answer weighs as much as its keys' share of the softmax."""
    shape = table_RW.shape
    begin_W = torch.arange(shape[1], device=position_R.device) * cache.page_size
    used_RW = (position_R[:, None] + 1 - begin_W).clamp(0, cache.page_size)
    first_query = torch.arange(shape.numel() + 1, dtype=torch.int32, device=position_R.device)
    first_key = F.pad((table_RW * cache.page_size).flatten(), (0, 1)).int()
    used = used_RW.flatten().int()

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.write(layer, slot_R, k_RGP, v_RGP)
        out, log_sum, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 (the public one knows no lengths)
            q_RHP[:, None].expand(-1, shape[1], -1, -1).flatten(0, 1),
            cache.keys[layer],
            cache.values[layer],
            first_query,
            first_key,
            1,
            cache.page_size,
            0.0,
            False,
            False,
            window_size_left=-1,
            window_size_right=0,
            seqused_k=used,
        )
        log_sum_HRW = log_sum.unflatten(1, shape).masked_fill(used_RW == 0, -torch.inf)
        share_RWH = log_sum_HRW.softmax(-1).permute(1, 2, 0)
        return (out.unflatten(0, shape) * share_RWH[..., None]).sum(1).to(q_RHP.dtype)

    return attend


def by_length(cache: PagedCache, table_RW: Tensor, position_R: Tensor, slot_R: Tensor) -> Attend:
    """In place, but page by page for few rows of long tables, which alone keep few of a GPU's processors busy."""
    num_rows, width = table_RW.shape
    way = page_by_page if num_rows <= FEW_ROWS and width >= MANY_PAGES else in_place
    return way(cache, table_RW, position_R, slot_R)


def max_table(attention: RowAttention, page_size: int) -> int | None:
    """How many rows times pages a call may be asked for; None is any number."""
    if attention is gathered:
        return MAX_GATHERED_KEYS // page_size
    return MAX_PAIRS if attention is page_by_page else None


def best_attention(cache: PagedCache, num_heads: int) -> RowAttention:
    """In place if the kernel exists, takes these pages and agrees with gathering; else gathered."""
    if cache.keys.device.type != "cuda" or cache.keys.dtype not in HALF:
        return gathered
    if cache.page_size % KERNEL_PAGE_SIZE:
        message = "pages of %d positions are gathered; a page_size of %d, or a multiple, is read in place"
        logger.warning(message, cache.page_size, KERNEL_PAGE_SIZE)
        return gathered
    return first_that_agrees(cache, num_heads)


def first_that_agrees(cache: PagedCache, num_heads: int) -> RowAttention:
    """Split over keys if possible, which in some versions leaves rows unwritten (pytorch#194167)."""
    split = partial(in_place, num_splits=None)
    if works(cache, num_heads, "in place", split):
        return split
    is_in_place = works(cache, num_heads, "in place, not split over keys", in_place)
    is_paged = works(cache, num_heads, "page by page", page_by_page)
    if not is_in_place and not is_paged:
        logger.warning("keys are gathered")
        return gathered
    if is_in_place and is_paged:
        return by_length
    return in_place if is_in_place else page_by_page


def works(cache: PagedCache, num_heads: int, name: str, way: RowAttention) -> bool:
    try:
        if kernel_agrees(cache, num_heads, way):
            return True
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning("attention cannot read keys %s here: %s", name, beginning(error))
    else:
        logger.warning("attention that reads keys %s gives wrong results here", name)
    return False


def best_ragged(cache: PagedCache, num_heads: int, rows: RowAttention) -> RunAttention:
    """For runs, beside an attention of rows: in place if that reads tables and this agrees with gathering."""
    if rows in (gathered, page_by_page):
        return ragged
    try:
        if ragged_agrees(cache, num_heads):
            return ragged_in_place
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning("long runs cannot read keys in place here: %s", beginning(error))
    else:
        logger.warning("long runs that read keys in place give wrong results here")
    return ragged


def beginning(error: Exception) -> str:
    """What it says first. Of an operator that does not exist for a device, PyTorch lists all that does."""
    return shorten(str(error), MAX_SAID, placeholder=" …")


MAX_CHECKED_PAGES, MAX_CHECKED_ROWS = 32, 40


@torch.inference_mode()
def kernel_agrees(cache: PagedCache, num_heads: int, way: RowAttention) -> bool:
    """Whether it gives what `gathered` does for rows of many, some and one random pages. For an empty cache, which it
    leaves empty."""
    device, page_size = cache.keys.device, cache.page_size
    width = min(max(cache.null_page, 2), MAX_CHECKED_PAGES)
    longest = torch.arange(width, device=device).flip(0).clamp(max=cache.null_page - 1)
    first_only = torch.full_like(longest, cache.null_page).index_fill_(0, longest.new_zeros(1), cache.null_page - 1)
    table_RW = torch.stack([longest, longest.roll(1), first_only])
    position_R = torch.tensor([width * page_size - 1, (width - 1) * page_size + page_size // 2, 0], device=device)
    slot_R = torch.full_like(position_R, cache.padding_slot)
    return agree(cache, num_heads, 3, [partial(each, cache, table_RW, position_R, slot_R) for each in (way, gathered)])


@torch.inference_mode()
def ragged_agrees(cache: PagedCache, num_heads: int) -> bool:
    """`kernel_agrees` for runs of some rows behind many pages, of the first rows of a page, and of one row."""
    pages = list(reversed(range(min(cache.null_page, MAX_CHECKED_PAGES))))
    runs, stop = [], len(pages) * cache.page_size - cache.page_size // 2
    for rows in (range(max(0, stop - MAX_CHECKED_ROWS), stop), range(cache.page_size // 2), range(stop - 1, stop)):
        sequence = Sequence("checked", [0] * stop, SamplingParams(), seed=0, num_blocks=1, arrival=0)
        sequence.pages = pages
        runs.append(Run(sequence, rows, reaches_front=False))
    slot_R = torch.full((sum(len(run.rows) for run in runs),), cache.padding_slot, device=cache.keys.device)
    return agree(
        cache, num_heads, len(slot_R), [partial(each, cache, runs, slot_R) for each in (ragged_in_place, ragged)]
    )


def agree(cache: PagedCache, num_heads: int, num_rows: int, ways: Iterable[Callable[[], Attend]]) -> bool:
    """Whether all give the same for random rows and random keys in the first pages."""
    generator = torch.Generator().manual_seed(0)
    used = slice(0, min(cache.null_page, MAX_CHECKED_PAGES) * cache.page_size)

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, cache.keys.shape[-1], generator=generator).to(cache.keys)

    q_RHP, k_RGP = random(num_rows, num_heads), random(num_rows, cache.keys.shape[2])
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = random(used.stop, cache.keys.shape[2])
    found = [way()(q_RHP, k_RGP, k_RGP, 0) for way in ways]
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = 0
    return all(torch.allclose(found[0], other, rtol=0, atol=0.05) for other in found[1:])
