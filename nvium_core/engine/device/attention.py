"""Causal attention over the paged cache. The rows' own keys and values are first written to the cache.

`ragged` works on any device, and is the reference. `in_place` and `ragged_in_place` use the flash kernel, which reads
the pages directly. It needs CUDA, half precision of queries and cache alike, a page size that is a multiple of 256, and
calls without `cap`. fused/attention.py has both in Triton. All others read the cache in the queries' precision.

Shapes: R rows of a Step, B runs, Q rows of a run, W pages of a table, S keys of a run, H query heads, G key heads, P
head size.
"""

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import lru_cache, partial
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.paged_cache import HALF, KERNEL_PAGE_SIZE, PagedCache, Read, upload_all
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.config import NviumConfig
from nvium_core.model.llama import Attend, causal_mask, dense_attention
from nvium_core.model.plan import LayerCall

logger = logging.getLogger(__name__)

TRITON_TYPES = (*HALF, torch.float32)

RunAttention = Callable[[PagedCache, Items[Rows]], Read]
"""(cache, runs) → attention for runs of several rows."""

RowAttention = Callable[[PagedCache, Tensor, Tensor], Read]
"""(cache, page tables [R, W], positions [R]) → attention for one row per sequence."""


def cached_attention(cache: PagedCache, slot_R: Tensor, read: Read) -> Attend:
    """Return attention that first writes the rows' keys and values to their cache slots."""

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, call: LayerCall) -> Tensor:
        cache.write(call.cache, slot_R, k_RGP, v_RGP)
        return read(q_RHP, call)

    return attend


def ragged(cache: PagedCache, runs: Items[Rows]) -> Read:
    """Attend run by run, with copies of the keys and values: on any device, and the reference for the kernels."""
    slots = upload_all(cache.keys.device, *(cache.slots([Rows(run.sequence, range(run.rows.stop))]) for run in runs))
    lengths = [len(run.rows) for run in runs]

    @lru_cache(None)
    def mask(run: int, window: int | None) -> Tensor:
        return causal_mask(lengths[run], len(slots[run]), window, slots[run].device)

    def attend(q_RHP: Tensor, call: LayerCall) -> Tensor:
        found = []
        for run, (q_QHP, slot_S) in enumerate(zip(q_RHP.split(lengths), slots, strict=True)):
            known = cache.keys[call.cache, slot_S], cache.values[call.cache, slot_S]
            q_BHQP, k_BGSP, v_BGSP = (x.to(q_QHP.dtype).transpose(0, 1)[None] for x in (q_QHP, *known))
            found.append(dense_attention(q_BHQP, k_BGSP, v_BGSP, call, mask(run, call.window))[0].transpose(0, 1))
        return torch.cat(found)

    return attend


def in_place(cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> Read:
    first_query = torch.arange(len(position_R) + 1, dtype=torch.int32, device=position_R.device)
    return flash(cache, table_RW, position_R + 1, first_query, max_queries=1)


def ragged_in_place(cache: PagedCache, runs: Items[Rows]) -> Read:
    lengths = [len(run.rows) for run in runs]
    first_query, num_keys = np.cumsum([0, *lengths]), np.array([run.rows.stop for run in runs])
    table_BW, num_keys_B, first_query_B = upload_all(cache.keys.device, cache.tables(runs), num_keys, first_query)
    return flash(cache, table_BW, num_keys_B, first_query_B.int(), max_queries=max(lengths))


def flash(cache: PagedCache, table_BW: Tensor, num_keys_B: Tensor, first_query: Tensor, *, max_queries: int) -> Read:
    """Attend with the flash kernel.

    The kernel may split a long context among multiprocessors only if queries are grouped or there is a single row. In
    all other cases splitting is disabled, because the split kernel writes every row over the first (pytorch#194167). A
    window disables the fast path of grouped queries.
    """
    from torch.nn.attention.varlen import varlen_attn  # also imports PyTorch's compiler, which takes a second

    tables, used_B = table_BW.int(), num_keys_B.int()
    first_key = torch.cat([first_query[:1], used_B.cumsum(0, dtype=torch.int32)])
    max_keys = table_BW.shape[1] * cache.page_size
    pages = (-1, cache.page_size)

    def attend(q_RHP: Tensor, call: LayerCall) -> Tensor:
        is_grouped = q_RHP.shape[1] != cache.keys.shape[2]
        is_causal = max_queries > 1 or call.window is not None
        is_split = max_queries == 1 and (len(q_RHP) == 1 or (is_grouped and not is_causal))
        given: dict[str, Any] = {"enable_gqa": True} if is_grouped else {}  # PyTorch 2.11 lacks it
        if call.scale is not None:
            given["scale"] = call.scale
        out_RHP = varlen_attn(
            q_RHP,
            cache.keys[call.cache].unflatten(0, pages),
            cache.values[call.cache].unflatten(0, pages),
            first_query,
            first_key,
            max_queries,
            max_keys,
            window_size=((call.window or 0) - 1, 0 if is_causal else -1),
            **given,
            seqused_k=used_B,
            block_table=tables,
            num_splits=None if is_split else 1,
        )
        assert isinstance(out_RHP, Tensor)
        return out_RHP

    return attend


def best_kernels(cache: PagedCache, config: NviumConfig) -> tuple[RowAttention, RunAttention] | None:
    """Return the first kernels that support this cache and model and agree with `ragged`, or None."""
    for name, rows, runs in kernels(cache, config):
        of_rows = works(f"{name} attention for rows", partial(kernel_agrees, cache, config, rows))
        if of_rows and works(f"{name} attention for long runs", partial(ragged_agrees, cache, config, runs)):
            return rows, runs
    return None


def kernels(cache: PagedCache, config: NviumConfig) -> Iterable[tuple[str, RowAttention, RunAttention]]:
    """Yield the kernels that may support this cache and model, the fastest first. Triton must support the cache."""
    if cache.keys.device.type != "cuda":
        return
    is_half = cache.keys.dtype == cache.states_NSD.dtype in HALF
    if is_half and cache.page_size % KERNEL_PAGE_SIZE == 0 and config.attention_cap is None:
        yield "flash", in_place, ragged_in_place
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
CHECKED_WINDOW = 3
"""So small that one key too many or too few shows."""


def kernel_agrees(cache: PagedCache, config: NviumConfig, kernel: RowAttention) -> bool:
    """Whether a kernel agrees with `ragged` on rows with many, fewer and one key. See `agrees`."""

    def attend(cache: PagedCache, runs: Items[Rows]) -> Read:
        last_R = np.array([run.rows[-1] for run in runs])
        return kernel(cache, *upload_all(cache.keys.device, cache.tables(runs), last_R))

    last = num_checked(cache) - 1
    rows = [range(row, row + 1) for row in (last, max(0, last - cache.page_size // 2), 0)]
    single = rows[:1]  # for a single row, the kernel splits the keys among multiprocessors
    return all(agrees(cache, config, attend, each) for each in (rows, single))


def ragged_agrees(cache: PagedCache, config: NviumConfig, kernel: RunAttention) -> bool:
    half, last = cache.page_size // 2, num_checked(cache) - 1
    rows = [range(max(half, last - MAX_CHECKED_ROWS), last), range(half), range(last, last + 1)]
    return agrees(cache, config, kernel, rows)


def num_checked(cache: PagedCache) -> int:
    return min(cache.null_page, MAX_CHECKED_PAGES) * cache.page_size


@torch.inference_mode()
def agrees(cache: PagedCache, config: NviumConfig, kernel: RunAttention, rows: Items[range]) -> bool:
    """Whether a kernel and `ragged` agree on these rows of one sequence, with random keys and queries, in all calls.

    In the first head, about half of the attention goes to the row's own key. In other heads, most goes to a few keys.
    The cache must be empty, and is so again.
    """
    sequence = Sequence("trial", [0], SamplingParams(), seed=0, num_blocks=1, arrival=0)
    sequence.pages = list(reversed(range(num_checked(cache) // cache.page_size)))
    runs = [Rows(sequence, each) for each in rows]
    slot_R = torch.from_numpy(cache.slots(runs)).to(cache.keys.device)
    generator = torch.Generator().manual_seed(0)
    num_keys = num_checked(cache)
    used = torch.cat([torch.arange(num_keys, device=slot_R.device), slot_R])
    num_key_heads, head_size = cache.keys.shape[2:]

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_size, generator=generator).clamp(-2, 2)

    q_RHP, k_RGP = 3 * random(len(slot_R), config.num_attention_heads), random(len(slot_R), num_key_heads)
    own_RP = q_RHP[:, 0]
    k_RGP[:, 0] = own_RP * (math.log(num_keys) + 4) * head_size**0.5 / own_RP.square().sum(-1, keepdim=True)
    q_RHP, k_RGP, v_RGP = (x.to(cache.states_NSD) for x in (q_RHP, k_RGP, random(len(slot_R), num_key_heads)))
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = random(len(used), num_key_heads).to(tensor)
    cache.write(0, slot_R, k_RGP, v_RGP)
    if config.attention_scale is not None:
        q_RHP *= head_size**-0.5 / config.attention_scale
    own, reference = kernel(cache, runs), ragged(cache, runs)
    pairs = [(own(q_RHP, call), reference(q_RHP, call)) for call in checked_calls(config)]
    for tensor in (cache.keys, cache.values):
        tensor[0, used] = 0
    return all(torch.allclose(found, expected, rtol=0, atol=CHECK_TOLERANCE) for found, expected in pairs)


def checked_calls(config: NviumConfig) -> list[LayerCall]:
    """Return a call of each kind of attention in the model, and one with a small window if any has a window."""
    windows: set[int | None] = {*config.windows, CHECKED_WINDOW} if any(config.windows) else {None}
    return [LayerCall(0, 0, config.attention_scale, config.attention_cap, window=window) for window in windows]
