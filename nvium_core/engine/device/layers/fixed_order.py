"""Bit-identical rows: the same sums in the same order, whatever else a Step carries.

What a row comes to depends on its company in two ways: matrix products choose their kernel by the number of rows, and
attention is padded to the longest sequence. So here rows are carried in tiles of a fixed size, of which it was checked
that a row's place in them does not matter, and every row attends alone, over its keys in splits of a fixed size.

Shapes: R rows of a tile, S keys, C keys of a split, H query heads, G key heads, M query heads to a key head, P head
size.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor, nn

from nvium_core.engine.device.layers.attention import PagedAttention
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.scheduler import Run, Step
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import NviumForCausalLM

TILE_SIZES = (16, 8, 4, 2, 1)
"""Tried in this order. Alone, a row is certainly alike; more rows share the reading of the weights."""

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


class FixedSplitAttention(PagedAttention):
    """Every row alone over all its keys, split by split. Rows without a run are padding and attend to the null slot."""

    def over(self, runs: Items[Run], slots_R: Tensor) -> Attend:
        slot_RS, visible_RS = self._keys_of_rows(runs, num_rows=len(slots_R))

        def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
            self.keys[layer, slots_R] = k_RGP
            self.values[layer, slots_R] = v_RGP
            splits = zip(slot_RS.split(KEYS_PER_SPLIT, 1), visible_RS.split(KEYS_PER_SPLIT, 1), strict=True)
            return self._attend_in_splits(q_RHP, splits, layer)

        return attend

    def _attend_in_splits(self, q_RHP: Tensor, splits: Iterator[tuple[Tensor, Tensor]], layer: int) -> Tensor:
        """Softmax attention by running maximum and sum, in float32 or better."""
        dtype = torch.promote_types(q_RHP.dtype, torch.float32)
        num_key_heads, head_dim = self.keys.shape[-2:]
        q_RGMP = q_RHP.unflatten(1, (num_key_heads, -1)).to(dtype) * head_dim**-0.5
        peak_RGM1 = torch.full_like(q_RGMP[..., :1], -torch.inf)
        total_RGM1, sum_RGMP = torch.zeros_like(peak_RGM1), torch.zeros_like(q_RGMP)
        for slot_RC, visible_RC in splits:
            k_RGCP = self.keys[layer, slot_RC].transpose(1, 2).to(dtype)
            v_RGCP = self.values[layer, slot_RC].transpose(1, 2).to(dtype)
            score_RGMC = (q_RGMP @ k_RGCP.mT).masked_fill(~visible_RC[:, None, None], -torch.inf)
            new_peak_RGM1 = torch.maximum(peak_RGM1, score_RGMC.amax(-1, keepdim=True))
            fade_RGM1 = (peak_RGM1 - new_peak_RGM1).exp()
            weight_RGMC = (score_RGMC - new_peak_RGM1).exp()
            total_RGM1 = total_RGM1 * fade_RGM1 + weight_RGMC.sum(-1, keepdim=True)
            sum_RGMP = sum_RGMP * fade_RGM1 + weight_RGMC @ v_RGCP
            peak_RGM1 = new_peak_RGM1
        return (sum_RGMP / total_RGM1).flatten(1, 2).to(q_RHP.dtype)

    def _keys_of_rows(self, runs: Items[Run], *, num_rows: int) -> tuple[Tensor, Tensor]:
        """Cache slots of every row's keys and which of them it may see, [R, S] each; S is whole splits."""
        longest = max(run.rows.stop for run in runs)
        num_keys = -(-longest // KEYS_PER_SPLIT) * KEYS_PER_SPLIT
        slot_RS = torch.full((num_rows, num_keys), self.null_slot)
        last_R1 = torch.zeros(num_rows, 1, dtype=torch.long)
        first_row = 0
        for run in runs:
            own = slice(first_row, first_row + len(run.rows))
            slot_RS[own, : run.rows.stop] = torch.tensor(slots(run.sequence, range(run.rows.stop), self.page_size))
            last_R1[own, 0] = torch.arange(run.rows.start, run.rows.stop)
            first_row = own.stop
        visible_RS = torch.arange(num_keys) <= last_R1
        return slot_RS.to(self.keys.device), visible_RS.to(self.keys.device)
