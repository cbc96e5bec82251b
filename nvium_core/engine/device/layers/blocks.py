"""The blocks of a model over its cache: rows go from one boundary to the next.

A row's hidden state at the last boundary it has passed lies in the row's cache slot, in one of two buffers: boundaries
take turns between them, so that no Step overwrites what it reads and one that failed can be run again.

Shapes: R rows of a Step, D width, S cache slots.
"""

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from nvium_core.engine.device.layers.attention import PagedAttention
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.scheduler import Step
from nvium_core.model.nvium import NviumForCausalLM


class PlainBlocks:
    """The model's own layers."""

    def __init__(
        self, model: NviumForCausalLM, attention: PagedAttention, states_2SD: Tensor, *, tile_size: int = 0
    ) -> None:
        """Steps are filled up to `tile_size` with rows that are nobody's."""
        self._model = model
        self._attention = attention
        self._states_2SD = states_2SD
        self._tile_size = tile_size

    def carry(self, step: Step) -> None:
        """Take the rows from the boundary before the block to the one behind it."""
        backbone = self._model.model
        padding = range(step.num_rows, self._tile_size)
        own_slots = [slot for run in step.runs for slot in slots(run.sequence, run.rows, self._attention.page_size)]
        slots_R = self._tensor(own_slots + [self._attention.padding_slot for _ in padding])
        positions_R = self._tensor([position for run in step.runs for position in run.rows] + [0 for _ in padding])
        if step.block:
            h_RD = self._states_2SD[step.block % 2, slots_R]
        else:
            token_ids = [token for run in step.runs for token in run.sequence.token_ids[run.rows.start : run.rows.stop]]
            h_RD = backbone.embed_tokens(self._tensor(token_ids + [0 for _ in padding]))
        attend = self._attention.over(step.runs, slots_R)
        rotary = backbone.rotary(positions_R, h_RD.dtype)
        h_RD = backbone.run(h_RD, self._model.config.blocks[step.block], rotary, attend)
        self._states_2SD[(step.block + 1) % 2, slots_R] = h_RD

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, device=self._states_2SD.device)
