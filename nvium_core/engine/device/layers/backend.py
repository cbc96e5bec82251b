"""PyTorch's layers, operator by operator: any device, any precision, any model. The reference for other backends.

Shapes: R rows of a Step, F fronts, D width, V vocabulary.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.adjustments import adjust
from nvium_core.engine.device.attention import ragged, sent
from nvium_core.engine.device.paged_cache import PagedCache, positions
from nvium_core.engine.device.sampling import draw_tokens
from nvium_core.engine.device.scoring import MAX_SCORED_ROWS, scores
from nvium_core.engine.events import Score
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step, StepResult
from nvium_core.model.exits import Exit
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import NviumForCausalLM


class LayersBackend:
    max_native_rows = 0
    max_scored_rows = MAX_SCORED_ROWS
    instructions: str | None = None
    has_waited = False

    def __init__(self, model: NviumForCausalLM, cache: PagedCache) -> None:
        self.model = model
        self.cache = cache

    @property
    def is_ahead(self) -> bool:
        return False

    @torch.inference_mode()
    def run(self, step: Step) -> list[StepResult]:
        tokens = np.array(tokens_of(step.runs) if step.block == 0 else [], np.int64)
        rows = self.cache.slots(step.runs), positions(step.runs), tokens
        self.forward(step, *sent(self.cache.keys.device, *rows))
        return [StepResult(step)]

    def forward(self, step: Step, slot_R: Tensor, position_R: Tensor, token_R: Tensor) -> None:
        """Take rows from the boundary before the block to the one behind it."""
        backbone, cache = self.model.model, self.cache
        h_RD = cache.states_behind(step.block - 1)[slot_R] if step.block else backbone.embed_tokens(token_R)
        rotary = backbone.rotary(position_R, h_RD.dtype)
        attend = self.attend(step.runs, position_R, slot_R)
        cache.states_behind(step.block)[slot_R] = backbone.run(
            h_RD, self.model.config.blocks[step.block], rotary, attend
        )

    def attend(self, runs: Items[Run], position_R: Tensor, slot_R: Tensor) -> Attend:
        return ragged(self.cache, runs, slot_R)

    @torch.inference_mode()
    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        exit_ = cast(Exit, self.model.exits[block])
        x_FD = exit_.norm(self.cache.states_behind(block)[self.tensor(slots)])
        return x_FD, exit_.route(x_FD).double().tolist()

    @torch.inference_mode()
    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        logits_RV = self.logits(block, x_FD[self.tensor(rows)]).double()
        adjust(logits_RV, sequences)
        return draw_tokens(logits_RV, [sequence.draw for sequence in sequences], uniforms)

    @property
    def draft_share(self) -> float:
        return 1.0

    def draft(self, block: int, x_FD: Tensor, sequences: Items[Sequence], uniforms: Items[float]) -> list[int]:
        return self.draw(block, x_FD, range(len(sequences)), sequences, uniforms)

    @torch.inference_mode()
    def logits(self, block: int, x_RD: Tensor) -> Tensor:
        exit_ = cast(Exit, self.model.exits[block])
        logits_RV: Tensor = self.model.lm_head(exit_.adapter(x_RD))
        return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))

    @torch.inference_mode()
    def score(self, slots: Items[int], targets: Items[int], num_top: Items[int]) -> list[Score]:
        return list(scores(self.model, self.cache.states_NSD, slots, targets, num_top, self.max_scored_rows))

    def tensor(self, values: Iterable[int]) -> Tensor:
        return torch.as_tensor(values, device=self.cache.keys.device, dtype=torch.long)


def tokens_of(runs: Items[Run]) -> list[int]:
    """Of every row of the runs, in order."""
    return [token for run in runs for token in run.sequence.token_ids[run.rows.start : run.rows.stop]]
