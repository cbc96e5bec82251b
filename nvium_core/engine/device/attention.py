"""Causal attention over the paged cache. The rows' own keys and values are first written to the cache.

`ragged` works on any device, and is the reference for fused/layers.py, which reads the pages in place.

Shapes: R rows of a Step, B runs, Q rows of a run, W pages of a table, S keys of a run, H query heads, G key heads, P
head size.
"""

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import lru_cache
from textwrap import shorten

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.paged_cache import PagedCache, Read, upload_all
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.config import NviumConfig
from nvium_core.model.llama import Attend, causal_mask, dense_attention
from nvium_core.model.plan import LayerCall

logger = logging.getLogger(__name__)

RunAttention = Callable[[PagedCache, Items[Rows]], Read]
"""(cache, runs) → attention for runs of several rows."""


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


def works(name: str, agrees: Callable[[], bool]) -> bool:
    """Whether a kernel agrees with its reference. If not, log the cause."""
    try:
        if agrees():
            return True
    except Exception as error:  # a compiler raises its own errors
        cause = shorten(str(error), 200, placeholder=" …")  # compilers write long messages
        logger.warning("%s is not available: %s", name, cause)
    else:
        logger.warning("%s gives wrong results on this device and is not used", name)
    return False


MAX_CHECKED_PAGES, MAX_CHECKED_ROWS = 32, 40
CHECK_TOLERANCE = 0.02


def kernels_agree(
    cache: PagedCache, config: NviumConfig, of_rows: Callable[[PagedCache, Tensor, Tensor], Read], of_runs: RunAttention
) -> bool:
    """Whether kernels agree with `ragged`: on rows with many, fewer and one key, and on runs. See `agrees`.

    of_rows: (cache, page tables [R, W], positions [R]) → attention for one row per sequence.
    """

    def attend(cache: PagedCache, runs: Items[Rows]) -> Read:
        last_R = np.array([run.rows[-1] for run in runs])
        return of_rows(cache, *upload_all(cache.keys.device, cache.tables(runs), last_R))

    half, last = cache.page_size // 2, num_checked(cache) - 1
    rows = [range(row, row + 1) for row in (last, max(0, last - half), 0)]
    single = rows[:1]  # several programs share the keys of a single row
    long = [range(max(half, last - MAX_CHECKED_ROWS), last), range(half), range(last, last + 1)]
    checked = (attend, rows), (attend, single), (of_runs, long)
    return all(agrees(cache, config, kernel, each) for kernel, each in checked)


def num_checked(cache: PagedCache) -> int:
    return min(cache.null_page, MAX_CHECKED_PAGES) * cache.page_size


@torch.inference_mode()
def agrees(cache: PagedCache, config: NviumConfig, kernel: RunAttention, rows: Items[range]) -> bool:
    """Whether a kernel and `ragged` agree on these rows of one sequence, with random keys and queries, in all calls.

    In the first head, about half of the attention goes to the row's own key. In other heads, most goes to a few keys.
    It writes to the cache, in which no sequence has pages yet.
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
    windows: set[int | None] = {*config.windows, 3} if any(config.windows) else {None}  # 3: one key too many shows
    calls = [LayerCall(0, 0, config.attention_scale, config.attention_cap, window=window) for window in windows]
    pairs = [(own(q_RHP, call), reference(q_RHP, call)) for call in calls]
    return all(torch.allclose(found, expected, rtol=0, atol=CHECK_TOLERANCE) for found, expected in pairs)
