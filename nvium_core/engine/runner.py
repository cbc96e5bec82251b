"""Carries out a Step on the device: gather rows, run one block, ask the junction, keep the hidden states.

Everything a Step needs arrives as flat arrays. A Step never overwrites what it has read before it is sure to succeed,
so one that raised can be run again. All buffers are allocated once.

Shapes: R rows of the Step, D width.
"""

from collections.abc import Sequence as Items
from itertools import accumulate

import torch
from torch import Tensor

from nvium_core.engine.attention import PagedAttention
from nvium_core.engine.junction import Junction, Junctions
from nvium_core.engine.kv_cache import slots
from nvium_core.engine.scheduler import Step
from nvium_core.model.nvium import NviumForCausalLM


class Runner:
    def __init__(self, model: NviumForCausalLM, *, num_pages: int, page_size: int, max_sequences: int) -> None:
        self._model = model.eval()
        self._page_size = page_size
        weight = model.lm_head.weight
        self._attention = PagedAttention(model.config, num_pages=num_pages, page_size=page_size, like=weight)
        self._junctions = Junctions(model, max_sequences=max_sequences)
        self._hidden = weight.new_zeros(num_pages * page_size, model.config.hidden_size)
        """Each row's hidden state at the last boundary it has passed, in the row's cache slot."""

    @torch.inference_mode()
    def run(self, step: Step) -> list[Junction | None]:
        """Run the Step; one entry per run, None where the front was not reached."""
        backbone = self._model.model
        slots_R = self._tensor([slot for run in step.runs for slot in slots(run.sequence, run.rows, self._page_size)])
        positions_R = self._tensor([position for run in step.runs for position in run.rows])
        h_RD = self._arriving(step, slots_R)
        attend = self._attention.over(step.runs, slots_R)
        rotary = backbone.rotary(positions_R, h_RD.dtype)
        h_RD = backbone.run(h_RD, self._model.config.blocks[step.block], rotary, attend)
        junctions = self._ask(step, h_RD)
        self._hidden[slots_R] = h_RD
        return junctions

    def _arriving(self, step: Step, slots_R: Tensor) -> Tensor:
        """The rows' hidden states at the boundary before the block; embeddings before the first."""
        if step.block:
            return self._hidden[slots_R]
        token_ids = [token for run in step.runs for token in run.sequence.token_ids[run.rows.start : run.rows.stop]]
        embedded: Tensor = self._model.model.embed_tokens(self._tensor(token_ids))
        return embedded

    def _ask(self, step: Step, h_RD: Tensor) -> list[Junction | None]:
        """The junction, for the runs that reached their fronts."""
        last_rows = [end - 1 for end in accumulate(len(run.rows) for run in step.runs)]
        fronts = [(run.sequence, row) for run, row in zip(step.runs, last_rows, strict=True) if run.reaches_front]
        if not fronts:
            return [None] * len(step.runs)
        sequences, rows = zip(*fronts, strict=True)
        answers = iter(self._junctions.ask(step.block, sequences, h_RD[self._tensor(rows)]))
        return [next(answers) if run.reaches_front else None for run in step.runs]

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, device=self._hidden.device)
