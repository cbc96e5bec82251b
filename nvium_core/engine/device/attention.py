"""Causal attention over the paged cache. The rows' own keys and values are first written to the cache.

`gathered` copies the pages into a padded tensor. It works on any device, and is the reference.
`in_place` uses the flash kernel, which reads the pages directly. The kernel needs CUDA, half precision and a page size
that is a multiple of 256. Both take one row per sequence. `ragged` and `ragged_in_place` take runs of several rows.
fused/attention.py has both in Triton.

Shapes: R rows of a Step, B runs, Q rows of the longest run, W pages of a table, S = W · page size keys, H query heads,
G key heads, P head size.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from importlib.util import find_spec
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.paged_cache import HALF, KERNEL_PAGE_SIZE, Integers, PagedCache, upload
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN_ROWS
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.llama import Attend

logger = logging.getLogger(__name__)

TRITON_TYPES = (*HALF, torch.float32)

Read = Callable[[Tensor, int], Tensor]
"""(queries [R, H, P], layer index) → attention to the cached keys, [R, H, P]."""

RunAttention = Callable[[PagedCache, Items[Rows]], Read]
"""(cache, runs) → attention for runs of several rows."""

RowAttention = Callable[[PagedCache, Tensor, Tensor], Read]
"""(cache, page tables [R, W], positions [R]) → attention for one row per sequence."""


def written(cache: PagedCache, slot_R: Tensor, read: Read) -> Attend:
    """Return attention that first writes the rows' keys and values to their cache slots."""

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.write(layer, slot_R, k_RGP, v_RGP)
        return read(q_RHP, layer)

    return attend


def gathered(cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> Read:
    keys = GatheredKeys.of(cache, table_RW, position_R[:, None])
    return lambda q_RHP, layer: cache.attend(q_RHP[:, None], *keys, layer)[:, 0]


class GatheredKeys(NamedTuple):
    """Keys to gather. slot_BS: cache slots of each run's keys. mask_B1QS: True where a query attends to a key."""

    slot_BS: Tensor
    mask_B1QS: Tensor

    @classmethod
    def of(cls, cache: PagedCache, table_BW: Tensor, position_BQ: Tensor) -> "GatheredKeys":
        """Read the null slot for keys after a run's last row: the mask would not stop a NaN of another sequence."""
        within_page = torch.arange(cache.page_size, device=table_BW.device)
        slot_BS = (table_BW[:, :, None] * cache.page_size + within_page).flatten(1)
        key_S = torch.arange(slot_BS.shape[1], device=table_BW.device)
        slot_BS = slot_BS.where(key_S <= position_BQ[:, -1:], cache.null_slot)
        return cls(slot_BS, (key_S <= position_BQ[:, :, None])[:, None])


def ragged(cache: PagedCache, runs: Items[Rows]) -> Read:
    """Attend with runs of any length, like `gathered`. Runs of similar length form a batch."""
    batches = [batch(cache, runs, numbers, cache.keys.device) for numbers in group_similar(runs, cache.page_size)]

    def attend(q_RHP: Tensor, layer: int) -> Tensor:
        out_RHP = torch.empty_like(q_RHP)
        for each in batches:
            out_BQHP = cache.attend(q_RHP[each.row_BQ], *each.keys, layer)
            out_RHP[each.rows] = out_BQHP.flatten(0, 1)[each.places]
        return out_RHP

    return attend


class PaddedRuns(NamedTuple):
    """Runs that attend in one call. Shorter runs are padded with their last row.

    row_BQ: indices of the runs' rows in the Step, with padding. places: flat indices into row_BQ, without padding.
    rows: the elements of row_BQ at `places`.
    """

    row_BQ: Tensor
    keys: GatheredKeys
    places: Tensor
    rows: Tensor


def group_similar(runs: Items[Rows], page_size: int) -> Iterable[list[int]]:
    """Group runs into batches. A long run is alone. Short runs form a batch if padding at most doubles their pages."""
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        is_long = len(run.rows) > MAX_SHORT_RUN_ROWS
        batches[number if is_long else -1, power_of_two(-(-run.rows.stop // page_size))].append(number)
    return batches.values()


def batch(cache: PagedCache, runs: Items[Rows], numbers: list[int], device: torch.device) -> PaddedRuns:
    first_rows = np.cumsum([0, *(len(run.rows) for run in runs)])
    members = [runs[number] for number in numbers]
    last_B1 = np.array([[len(run.rows) - 1] for run in members])
    start_B1 = np.array([[run.rows.start] for run in members])
    every_Q = np.arange(last_B1.max() + 1)
    place_BQ = np.minimum(every_Q, last_B1)
    row_BQ = first_rows[numbers][:, None] + place_BQ
    is_own_BQ = every_Q <= last_B1
    row, table, position, places, rows = upload_all(
        device, row_BQ, cache.tables(members), start_B1 + place_BQ, np.flatnonzero(is_own_BQ), row_BQ[is_own_BQ]
    )
    return PaddedRuns(row, GatheredKeys.of(cache, table, position), places, rows)


def upload_all(device: torch.device, *arrays: Integers) -> list[Tensor]:
    """Upload integer arrays in one copy."""
    packed = upload(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def in_place(cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> Read:
    first_query = torch.arange(len(position_R) + 1, dtype=torch.int32, device=position_R.device)
    return flash(cache, table_RW, position_R + 1, first_query, max_queries=1)


def ragged_in_place(cache: PagedCache, runs: Items[Rows]) -> Read:
    """Attend with runs of any length, like `in_place`."""
    lengths = [len(run.rows) for run in runs]
    first_query, num_keys = np.cumsum([0, *lengths]), np.array([run.rows.stop for run in runs])
    table_BW, num_keys_B, first_query_B = upload_all(cache.keys.device, cache.tables(runs), num_keys, first_query)
    return flash(cache, table_BW, num_keys_B, first_query_B.int(), max_queries=max(lengths))


def flash(cache: PagedCache, table_BW: Tensor, num_keys_B: Tensor, first_query: Tensor, *, max_queries: int) -> Read:
    """Attend with the flash kernel.

    The kernel may split a long context among multiprocessors only if queries are grouped or there is a single row. In
    all other cases splitting is disabled, because the split kernel writes every row over the first (pytorch#194167).
    """
    from torch.nn.attention.varlen import varlen_attn  # also imports PyTorch's compiler, which takes a second

    tables, used_B = table_BW.int(), num_keys_B.int()
    first_key = torch.cat([first_query[:1], used_B.cumsum(0, dtype=torch.int32)])
    max_keys = table_BW.shape[1] * cache.page_size
    pages = (-1, cache.page_size)

    def attend(q_RHP: Tensor, layer: int) -> Tensor:
        is_grouped = q_RHP.shape[1] != cache.keys.shape[2]
        grouping: dict[str, Any] = {"enable_gqa": True} if is_grouped else {}  # PyTorch 2.11 lacks it
        is_split = max_queries == 1 and (is_grouped or len(q_RHP) == 1)
        out_RHP = varlen_attn(
            q_RHP,
            cache.keys[layer].unflatten(0, pages),
            cache.values[layer].unflatten(0, pages),
            first_query,
            first_key,
            max_queries,
            max_keys,
            window_size=(-1, 0) if max_queries > 1 else (-1, -1),  # a window disables the fast path of grouped queries
            **grouping,
            seqused_k=used_B,
            block_table=tables,
            num_splits=None if is_split else 1,
        )
        assert isinstance(out_RHP, Tensor)
        return out_RHP

    return attend


def best_attention(cache: PagedCache, num_heads: int) -> RowAttention | None:
    """Return the first kernel that supports this cache and agrees with `gathered`, or None."""
    for name, rows, _ in kernels(cache):
        if works(f"{name} attention for rows", partial(kernel_agrees, cache, num_heads, rows)):
            return rows
    return None


def best_ragged(cache: PagedCache, num_heads: int) -> RunAttention:
    """Return the first kernel that supports this cache and agrees with `ragged`, else `ragged`."""
    for name, _, runs in kernels(cache):
        if works(f"{name} attention for long runs", partial(ragged_agrees, cache, num_heads, runs)):
            return runs
    return ragged


def kernels(cache: PagedCache) -> Iterable[tuple[str, RowAttention, RunAttention]]:
    """Yield the kernels that may support this cache, the fastest first."""
    if cache.keys.device.type != "cuda":
        return
    if cache.keys.dtype in HALF and cache.page_size % KERNEL_PAGE_SIZE == 0:
        yield "flash", in_place, ragged_in_place
    if cache.keys.dtype in TRITON_TYPES and find_spec("triton"):
        from nvium_core.engine.device.fused.attention import in_tiles, ragged_in_tiles

        yield "Triton", in_tiles, ragged_in_tiles


def works(name: str, agrees: Callable[[], bool]) -> bool:
    """Whether a kernel agrees with its reference. If not, log the cause."""
    try:
        if agrees():
            return True
    except Exception as error:  # a compiler raises its own errors
        cause = shorten(str(error), 200, placeholder=" …")  # the message lists every supported device
        logger.warning("%s is not available: %s", name, cause)
    else:
        logger.warning("%s gives wrong results on this device and is not used", name)
    return False


MAX_CHECKED_PAGES, MAX_CHECKED_ROWS = 32, 40
CHECK_TOLERANCE = 0.02


@torch.inference_mode()
def kernel_agrees(cache: PagedCache, num_heads: int, kernel: RowAttention) -> bool:
    """Whether a kernel agrees with `gathered` on rows with many, fewer and one key. The cache must be empty.

    Afterwards the cache is empty again.
    """
    device, page_size = cache.keys.device, cache.page_size
    width = min(max(cache.null_page, 2), MAX_CHECKED_PAGES)
    longest = torch.arange(width, device=device).flip(0).clamp(max=cache.null_page - 1)
    first_only = torch.full_like(longest, cache.null_page).index_fill_(0, longest.new_zeros(1), cache.null_page - 1)
    table_RW = torch.stack([longest, longest.roll(1), first_only])
    position_R = torch.tensor([width * page_size - 1, (width - 1) * page_size + page_size // 2, 0], device=device)
    page_R1 = table_RW.gather(1, (position_R // page_size)[:, None])
    slot_R = page_R1[:, 0] * page_size + position_R % page_size
    for count in (3, 1):  # for a single row, the kernel splits the keys among multiprocessors
        rows = (table_RW[:count], position_R[:count])
        if not agree(cache, num_heads, slot_R[:count], [partial(each, cache, *rows) for each in (kernel, gathered)]):
            return False
    return True


@torch.inference_mode()
def ragged_agrees(cache: PagedCache, num_heads: int, kernel: RunAttention) -> bool:
    """Whether a kernel agrees with `ragged` on a long, a medium and a single-row run. See `kernel_agrees`."""
    pages = list(reversed(range(min(cache.null_page, MAX_CHECKED_PAGES))))
    half, last = cache.page_size // 2, len(pages) * cache.page_size - 1
    runs = []
    for rows in (range(max(half, last - MAX_CHECKED_ROWS), last), range(half), range(last, last + 1)):
        sequence = Sequence("checked", [0] * (last + 1), SamplingParams(), seed=0, num_blocks=1, arrival=0)
        sequence.pages = pages
        runs.append(Rows(sequence, rows))
    slot_R = torch.from_numpy(cache.slots(runs)).to(cache.keys.device)
    return agree(cache, num_heads, slot_R, [partial(each, cache, runs) for each in (kernel, ragged)])


def agree(cache: PagedCache, num_heads: int, slot_R: Tensor, reads: Iterable[Callable[[], Read]]) -> bool:
    """Whether the kernels agree on random keys and queries.

    In the first head, about half of the attention goes to the row's own key. In other heads, most goes to a few keys.
    """
    generator = torch.Generator().manual_seed(0)
    num_keys = min(cache.null_page, MAX_CHECKED_PAGES) * cache.page_size
    used = torch.cat([torch.arange(num_keys, device=slot_R.device), slot_R])
    num_key_heads, head_size = cache.keys.shape[2:]

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_size, generator=generator).clamp(-2, 2)

    q_RHP, k_RGP = 3 * random(len(slot_R), num_heads), random(len(slot_R), num_key_heads)
    own_RP = q_RHP[:, 0]
    k_RGP[:, 0] = own_RP * (math.log(num_keys) + 4) * head_size**0.5 / own_RP.square().sum(-1, keepdim=True)
    q_RHP, k_RGP, v_RGP = (x.to(cache.keys) for x in (q_RHP, k_RGP, random(len(slot_R), num_key_heads)))
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = random(len(used), num_key_heads).to(tensor)
    cache.write(0, slot_R, k_RGP, v_RGP)
    found = [read()(q_RHP, 0) for read in reads]
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = 0
    return all(torch.allclose(found[0], other, rtol=0, atol=CHECK_TOLERANCE) for other in found[1:])
