"""The key/value cache's tensors, and the attention of a Step's ragged rows over them.

Shapes: R rows of the Step, B sequences padded together, Q and S their longest run of queries and of keys, H query
heads, G key heads, P head size.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.scheduler import SHORT_RUN, Run
from nvium_core.model.config import NviumConfig
from nvium_core.model.llama import Attend, dense_attention

HALF = (torch.bfloat16, torch.float16)

KERNEL_PAGE_SIZE = 256
"""Pages of multiples of this FlashAttention 2, which is PyTorch's own, reads in place; half precision on CUDA only."""

PAGE_SIZE = 16


def best_page_size(like: Tensor) -> int:
    """Where nothing is said; `like` has the cache's precision and device."""
    return KERNEL_PAGE_SIZE if like.is_cuda and like.dtype in HALF else PAGE_SIZE


@dataclass(frozen=True)
class AttentionGroup:
    """Runs that attend in one call.

    row_BQ: each query's row in the Step (padding repeats row 0). slot_BS: cache slots of the keys. mask: [B, 1, Q, S],
    True where a query may see a key; None if every query sees every key. sources: flat [B · Q] positions of the real
    queries, in the order of the group's rows. rows: those rows.
    """

    row_BQ: Tensor
    slot_BS: Tensor
    mask: Tensor | None
    sources: Tensor
    rows: Tensor


class PagedAttention:
    def __init__(self, config: NviumConfig, *, num_pages: int, page_size: int, like: Tensor) -> None:
        """`like` gives precision and device."""
        self.page_size = page_size
        self.null_slot = num_pages * page_size
        """Nobody's and always zero: what padding attends to, though masked, must not be another sequence's NaN."""
        self.padding_slot = self.null_slot + 1
        """Where rows that are nobody's leave their keys and values, which nobody reads."""
        self.num_slots = num_pages * page_size + max(2, page_size)
        """Whole pages, as kernels want them."""
        heads = config.num_key_value_heads or config.num_attention_heads
        shape = (config.num_hidden_layers, self.num_slots, heads, config.head_dim or 0)
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)

    def over(self, runs: Items[Run], slots_R: Tensor) -> Attend:
        """Attention for a Step: each row's key and value enter the cache, then it sees its sequence up to itself."""
        groups = self._groups(runs)

        def attend(q_RHP: Tensor, k_RGP: Tensor, v_RGP: Tensor, layer: int) -> Tensor:
            self.keys[layer, slots_R] = k_RGP
            self.values[layer, slots_R] = v_RGP
            out_RHP = torch.empty_like(q_RHP)
            for group in groups:
                out_RHP[group.rows] = self._attend(group, q_RHP, layer)
            return out_RHP

        return attend

    def _attend(self, group: AttentionGroup, q_RHP: Tensor, layer: int) -> Tensor:
        q_BHQP = q_RHP[group.row_BQ].transpose(1, 2)
        k_BGSP = self.keys[layer, group.slot_BS].transpose(1, 2)
        v_BGSP = self.values[layer, group.slot_BS].transpose(1, 2)
        out_BQHP = dense_attention(q_BHQP, k_BGSP, v_BGSP, group.mask).transpose(1, 2)
        return out_BQHP.flatten(0, 1)[group.sources]

    def _groups(self, runs: Items[Run]) -> list[AttentionGroup]:
        """Long runs alone, short ones together."""
        first_row, short, groups = 0, [], []
        for run in runs:
            placed = (run, first_row)
            first_row += len(run.rows)
            if len(run.rows) > SHORT_RUN:
                groups.append(self._group([placed]))
            else:
                short.append(placed)
        return groups + ([self._group(short)] if short else [])

    def _group(self, placed_runs: Items[tuple[Run, int]]) -> AttentionGroup:
        rows = [torch.arange(first, first + len(run.rows)) for run, first in placed_runs]
        positions = [torch.arange(run.rows.start, run.rows.stop) for run, _ in placed_runs]
        keys = [torch.tensor(slots(run.sequence, range(run.rows.stop), self.page_size)) for run, _ in placed_runs]
        row_BQ = pad_sequence(rows, batch_first=True)
        position_BQ = pad_sequence(positions, batch_first=True)
        slot_BS = pad_sequence(keys, batch_first=True, padding_value=self.null_slot)
        mask_BQS = position_BQ[:, :, None] >= torch.arange(slot_BS.shape[1])
        sources = [torch.arange(len(r)) + b * row_BQ.shape[1] for b, r in enumerate(rows)]
        device = self.keys.device
        return AttentionGroup(
            row_BQ.to(device),
            slot_BS.to(device),
            None if bool(mask_BQS.all()) else mask_BQS[:, None].to(device),
            torch.cat(sources).to(device),
            torch.cat(rows).to(device),
        )
