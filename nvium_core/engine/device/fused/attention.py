"""Attention over the paged cache in Triton, for every call of a plan, any number of query heads per key head and any
page size.

`ragged` of ../attention.py is the reference.

Shapes: R rows, B tiles, H query heads, G key heads, P head size, W pages of a table.
"""

import math
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.fused import kernels
from nvium_core.engine.device.paged_cache import PagedCache, Read, power_of_two, upload_all
from nvium_core.engine.schedule.step import Rows
from nvium_core.model.plan import LayerCall

NUM_PROGRAMS = 264
"""Twice the multiprocessors of a large GPU. Rows with fewer programs split their keys among several."""

MAX_SPLITS, MIN_SPLIT_KEYS = 32, 256
KEY_BLOCK, MIN_TILE, ROWS_PER_TILE = 32, 16, 16


def ragged_in_tiles(cache: PagedCache, runs: Items[Rows]) -> Read:
    """Attend with runs of any length, in tiles of `ROWS_PER_TILE` rows."""
    first, found = 0, list[tuple[int, int, int, int]]()
    for number, run in enumerate(runs):
        for start in range(run.rows.start, run.rows.stop, ROWS_PER_TILE):
            found.append((number, start, first + start - run.rows.start, min(ROWS_PER_TILE, run.rows.stop - start)))
        first += len(run.rows)
    tile_B4 = np.array(found)
    tables_BW, position_B, first_B2 = upload_all(
        cache.keys.device, cache.tables(runs)[tile_B4[:, 0]], tile_B4[:, 1], tile_B4[:, 2:]
    )
    return in_tiles(cache, tables_BW, position_B, first_B2)


def in_tiles(cache: PagedCache, table_BW: Tensor, position_B: Tensor, first_B2: Tensor | None = None) -> Read:
    """Attend with tiles of consecutive rows of a run.

    position_B: the position of each tile's first row. first_B2: its index, and the number of rows. Without them, tile b
    is row b, the only row of its sequence.
    """
    num_keys, head_size = cache.keys.shape[2:]
    num_tiles, width = table_BW.shape
    rows_per_tile = 1 if first_B2 is None else ROWS_PER_TILE

    def attend(q_RHP: Tensor, call: LayerCall) -> Tensor:
        rows, heads, _ = q_RHP.shape
        max_keys = min(width * cache.page_size, call.window or math.inf)
        splits = 1 if first_B2 is not None else num_splits(num_tiles * num_keys, max_keys)
        out_RHP = q_RHP.new_empty(q_RHP.shape)
        part, lse = out_RHP, out_RHP
        if splits > 1:
            exact = torch.promote_types(q_RHP.dtype, torch.float32)
            part = q_RHP.new_empty((splits, *q_RHP.shape), dtype=exact)
            lse = q_RHP.new_empty((splits, rows, heads), dtype=exact)
        shared = {"head_size": head_size, "num_splits": splits, "padded": power_of_two(head_size)}
        kernels.attend_pages[(num_tiles, num_keys, splits)](
            *(q_RHP, cache.keys[call.cache], cache.values[call.cache]),
            *(table_BW, position_B if first_B2 is None else first_B2),
            *(position_B, out_RHP, part, lse, call.scale or head_size**-0.5, call.cap, call.window),
            *(position_B.stride(0), width, q_RHP.stride(0), rows),
            page_size=cache.page_size,
            num_keys=num_keys,
            group=heads // num_keys,
            tile=max(MIN_TILE, power_of_two(rows_per_tile * heads // num_keys)),
            num_queries=rows_per_tile,
            block=KEY_BLOCK,
            wide=kernels.wide_of(q_RHP),
            **shared,
        )
        if splits > 1:
            kernels.combine[(rows * heads,)](part, lse, out_RHP, rows * heads, **shared)
        return out_RHP

    return attend


def num_splits(num_programs: int, max_keys: float) -> int:
    """Return a power of two: how many programs share a row's keys."""
    most = min(NUM_PROGRAMS // num_programs, int(max_keys) // MIN_SPLIT_KEYS, MAX_SPLITS)
    return 1 << max(0, most.bit_length() - 1)
