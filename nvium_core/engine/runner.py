"""Carries out a Step on the device: gather rows, run one block, ask the junction, keep the hidden states.

Everything a Step needs arrives as flat arrays. A Step never overwrites what it has read before it is sure to succeed,
so one that raised can be run again. All buffers are allocated once.

Shapes: R rows of the Step, D width.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from nvium_core.engine.attention import PagedAttention
from nvium_core.engine.events import Score
from nvium_core.engine.fixed_order import FixedSplitAttention, tile_size, tiles
from nvium_core.engine.junction import Junction, Junctions
from nvium_core.engine.kv_cache import slots
from nvium_core.engine.scheduler import Step
from nvium_core.engine.scoring import Ledger
from nvium_core.engine.sequence import Sequence
from nvium_core.model.nvium import NviumForCausalLM

SCORES_AT_ONCE = 32
"""Rows that are scored together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run: the junction's answer if the front was reached, and scores if any were wanted."""

    junction: Junction | None
    scores: list[Score] = field(default_factory=list)


class Runner:
    """`is_deterministic`: rows come out bit for bit the same whatever else runs, at the cost of speed."""

    def __init__(
        self,
        model: NviumForCausalLM,
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        is_deterministic: bool = False,
    ) -> None:
        self._model = model.eval()
        self._page_size = page_size
        weight = model.lm_head.weight
        attention = FixedSplitAttention if is_deterministic else PagedAttention
        self._attention = attention(model.config, num_pages=num_pages, page_size=page_size, like=weight)
        self._tile_size = tile_size(model) if is_deterministic else None
        self._junctions = Junctions(model, max_sequences=max_sequences)
        rows_at_once = 1 if is_deterministic else SCORES_AT_ONCE
        self._ledger = Ledger(model, max_sequences=max_sequences, rows_at_once=rows_at_once)
        self._hidden = weight.new_zeros(num_pages * page_size + 2, model.config.hidden_size)
        """Each row's hidden state at the last boundary it has passed, in the row's cache slot; zero for padding."""

    @torch.inference_mode()
    def run(self, step: Step) -> list[Outcome]:
        """Run the Step; one outcome per run."""
        parts = [step] if self._tile_size is None else tiles(step, self._tile_size)
        carried, own_slots = zip(*(self._carry(part) for part in parts), strict=True)
        h_RD = torch.cat(carried)
        junctions = self._ask(step, h_RD)
        scores = self._score(step, h_RD, junctions)
        self._hidden[torch.cat(own_slots)] = h_RD
        return [Outcome(*outcome) for outcome in zip(junctions, scores, strict=True)]

    def _carry(self, step: Step) -> tuple[Tensor, Tensor]:
        """Take rows through the block, [R, D], and say their slots, [R]. Tiles are filled up with rows that are
        nobody's."""
        backbone, num_rows = self._model.model, step.num_rows
        num_padding = 0 if self._tile_size is None else self._tile_size - num_rows
        own_slots = [slot for run in step.runs for slot in slots(run.sequence, run.rows, self._page_size)]
        slots_R = self._tensor(own_slots + [self._attention.padding_slot] * num_padding)
        positions_R = self._tensor([position for run in step.runs for position in run.rows] + [0] * num_padding)
        h_RD = self._hidden[slots_R] if step.block else self._embedded(step, num_padding)
        attend = self._attention.over(step.runs, slots_R)
        rotary = backbone.rotary(positions_R, h_RD.dtype)
        h_RD = backbone.run(h_RD, self._model.config.blocks[step.block], rotary, attend)
        return h_RD[:num_rows], slots_R[:num_rows]

    def _embedded(self, step: Step, num_padding: int) -> Tensor:
        token_ids = [token for run in step.runs for token in run.sequence.token_ids[run.rows.start : run.rows.stop]]
        embedded: Tensor = self._model.model.embed_tokens(self._tensor(token_ids + [0] * num_padding))
        return embedded

    def _ask(self, step: Step, h_RD: Tensor) -> list[Junction | None]:
        """The junction, for the runs that reached their fronts."""
        last_rows = [end - 1 for end in accumulate(len(run.rows) for run in step.runs)]
        fronts = [(run.sequence, row) for run, row in zip(step.runs, last_rows, strict=True) if run.reaches_front]
        if not fronts:
            return [None] * len(step.runs)
        sequences, rows = zip(*fronts, strict=True)
        answers = iter(self._answers(step.block, sequences, h_RD[self._tensor(rows)]))
        return [next(answers) if run.reaches_front else None for run in step.runs]

    def _answers(self, block: int, sequences: Items[Sequence], h_FD: Tensor) -> list[Junction]:
        """All fronts together, or where the bits matter one by one."""
        if self._tile_size is None:
            return self._junctions.ask(block, sequences, h_FD)
        alone = zip(sequences, h_FD.split(1), strict=True)
        return [answer for sequence, h_1D in alone for answer in self._junctions.ask(block, [sequence], h_1D)]

    def _score(self, step: Step, h_RD: Tensor, junctions: Items[Junction | None]) -> list[list[Score]]:
        """Scores, if this was the last block; else what they will need is kept."""
        if step.block == self._model.config.num_exits - 1:
            answers = [junction.token_id or 0 for junction in junctions if junction is not None]
            return self._ledger.score(step, h_RD, [max(token, 0) for token in answers])  # NO_TOKEN is not told
        self._ledger.keep(step, h_RD)
        return [[] for _ in step.runs]

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, device=self._hidden.device)
