"""Bit-identical rows: the same sums in the same order, whatever else a Step has.

A row's result depends on its company in two ways: matrix products choose their kernel by the number of rows, and
attention is padded to the longest sequence. So here rows go in tiles of a fixed size, of which it was checked that a
row's place in them does not matter, and every row attends alone, over its keys in splits of a fixed size.

Shapes: R rows of a tile, S keys, C keys of a split, W pages of a table, H query heads, G key heads, M query heads to a
key head, P head size.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor, nn

from nvium_core.engine.device.layers.backend import LayersBackend, tokens_of
from nvium_core.engine.device.paged_cache import PagedCache, positions
from nvium_core.engine.schedule.step import Run, Step, StepResult
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import NviumForCausalLM

TILE_SIZES = (16, 8, 4, 2, 1)
"""Tried in this order. A single row always qualifies; larger tiles share the reading of weights."""

KEYS_PER_SPLIT = 128


def tiles(step: Step, num_rows: int) -> Iterator[Step]:
    """The Step's rows in order, so many at a time; the last tile may have fewer."""
    runs, room = list[Run](), num_rows
    for run in step.runs:
        rows = run.rows
        while rows:
            runs.append(Run(run.sequence, rows[:room], reaches_front=False))
            room -= len(rows[:room])
            rows = rows[len(runs[-1].rows) :]
            if not room:
                yield Step(step.block, runs)
                runs, room = [], num_rows
    if runs:
        yield Step(step.block, runs)


@torch.inference_mode()
def tile_size(model: NviumForCausalLM) -> int:
    """The largest size in which a row's place and company change none of its bits, in any matrix product of a layer."""
    products = [module for module in model.model.layers[0].modules() if isinstance(module, nn.Linear)]
    return next(size for size in TILE_SIZES if all(rows_are_independent(product, size) for product in products))


def rows_are_independent(product: nn.Linear, num_rows: int) -> bool:
    """Whether rows come out the same wherever they stand among others."""
    generator = torch.Generator().manual_seed(num_rows)
    x_RD = torch.randn(num_rows, product.in_features, generator=generator).to(product.weight)
    expected = product(x_RD)
    return all(torch.equal(product(x_RD.roll(k, 0)), expected.roll(k, 0)) for k in range(1, num_rows)) and all(
        torch.equal(product(row_D.expand(num_rows, -1).contiguous())[0], expected_D)
        for row_D, expected_D in zip(x_RD, expected, strict=True)
    )


class FixedOrderBackend(LayersBackend):
    """Tiles of rows, every row alone over all its keys, split by split."""

    max_scored_rows = 1

    def __init__(self, model: NviumForCausalLM, cache: PagedCache) -> None:
        super().__init__(model, cache)
        self._tile_size = tile_size(model)

    @torch.inference_mode()
    def run(self, step: Step) -> list[StepResult]:
        for tile in tiles(step, self._tile_size):
            num_padding = self._tile_size - tile.num_rows
            padding = [0] * num_padding
            slots = [*self.cache.slots(tile.runs), *[self.cache.padding_slot] * num_padding]
            places = [*positions(tile.runs), *padding]
            tokens = [*tokens_of(tile.runs), *padding] if tile.block == 0 else []
            self.forward(tile, *map(self.tensor, (slots, places, tokens)))
        return [StepResult(step)]

    def attend(self, runs: Items[Run], position_R: Tensor, slot_R: Tensor) -> Attend:
        """Padding rows see the null slot."""
        table_BW = self.cache.tables(runs)
        table_RW = np.full((len(slot_R), table_BW.shape[1]), self.cache.null_page)
        own_rows = np.repeat(np.arange(len(runs)), [len(run.rows) for run in runs])
        table_RW[: len(own_rows)] = table_BW[own_rows]
        return fixed_order(self.cache, self.tensor(table_RW), position_R, slot_R)


def fixed_order(cache: PagedCache, table_RW: Tensor, position_R: Tensor, slot_R: Tensor) -> Attend:
    slot_RS, is_seen_RS = split_keys(cache, table_RW, position_R)

    def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
        cache.write(layer, slot_R, k_RGP, v_RGP)
        return attend_in_splits(cache, q_RHP, slot_RS, is_seen_RS, layer)

    return attend


def attend_in_splits(cache: PagedCache, q_RHP: Tensor, slot_RS: Tensor, is_seen_RS: Tensor, layer: int) -> Tensor:
    """Softmax attention by running maximum and sum, in float32 or better."""
    dtype = torch.promote_types(q_RHP.dtype, torch.float32)
    num_key_heads, head_dim = cache.keys.shape[-2:]
    q_RGMP = q_RHP.unflatten(1, (num_key_heads, -1)).to(dtype) * head_dim**-0.5
    peak_RGM1 = torch.full_like(q_RGMP[..., :1], -torch.inf)
    total_RGM1, sum_RGMP = torch.zeros_like(peak_RGM1), torch.zeros_like(q_RGMP)
    for slot_RC, is_seen_RC in zip(slot_RS.split(KEYS_PER_SPLIT, 1), is_seen_RS.split(KEYS_PER_SPLIT, 1), strict=True):
        k_RGCP = cache.keys[layer, slot_RC].transpose(1, 2).to(dtype)
        v_RGCP = cache.values[layer, slot_RC].transpose(1, 2).to(dtype)
        score_RGMC = (q_RGMP @ k_RGCP.mT).masked_fill(~is_seen_RC[:, None, None], -torch.inf)
        new_peak_RGM1 = torch.maximum(peak_RGM1, score_RGMC.amax(-1, keepdim=True))
        fade_RGM1 = (peak_RGM1 - new_peak_RGM1).exp()
        weight_RGMC = (score_RGMC - new_peak_RGM1).exp()
        total_RGM1 = total_RGM1 * fade_RGM1 + weight_RGMC.sum(-1, keepdim=True)
        sum_RGMP = sum_RGMP * fade_RGM1 + weight_RGMC @ v_RGCP
        peak_RGM1 = new_peak_RGM1
    return (sum_RGMP / total_RGM1).flatten(1, 2).to(q_RHP.dtype)


def split_keys(cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Cache slots of every row's keys and which of them it may see, [R, S] each; S is whole splits."""
    within_page = torch.arange(cache.page_size, device=table_RW.device)
    slot_RS = (table_RW[:, :, None] * cache.page_size + within_page).flatten(1)
    slot_RS = nn.functional.pad(slot_RS, (0, -slot_RS.shape[1] % KEYS_PER_SPLIT), value=cache.null_slot)
    is_seen_RS = torch.arange(slot_RS.shape[1], device=table_RW.device) <= position_R[:, None]
    return slot_RS.where(is_seen_RS, cache.null_slot), is_seen_RS
