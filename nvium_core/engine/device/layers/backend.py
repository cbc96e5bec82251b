"""Runs Steps with PyTorch operators, for any device, precision and model. The reference for other backends.

Shapes: R rows of a block, D width.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.attention import ragged, upload_all, written
from nvium_core.engine.device.decide import GOES_ON, decide
from nvium_core.engine.device.inputs import MAX_FRONTS, Front, Inputs, InputViews, Variant
from nvium_core.engine.device.paged_cache import PagedCache, positions, tokens_of, upload
from nvium_core.engine.device.scoring import ScoredRow, scores
from nvium_core.engine.events import StepReport
from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Emission, Outcome, Rows, Run, Step, StepResult
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import Nvium

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """State of a run during a Step."""

    run: Run
    filled: list[int]
    log_reached: float
    emissions: list[Emission] = field(default_factory=list)

    def rows(self, block: int) -> Rows:
        return Rows(self.run.sequence, range(self.filled[block], max(self.filled[block], self.run.stop)))

    def pass_rows(self, blocks: range, stop: int) -> None:
        for block in blocks:
            self.filled[block] = max(self.filled[block], stop)

    def record(self, row: int, exit_taken: float, token_id: float, log_p: float, log_continue: float) -> None:
        """Record a decision: the row continues or emits. Ignore it if the row follows a rejected draft."""
        sequence = self.run.sequence
        if sequence.is_original:
            drafts = sequence.token_ids[sequence.num_verified : row + 1]
            if [emission.token_id for emission in self.emissions[: len(drafts)]] != drafts:
                return
        if token_id == GOES_ON:
            self.log_reached += log_continue
        else:
            self.emissions.append(Emission(int(token_id), int(exit_taken), self.log_reached + log_p))
            self.log_reached = 0.0


Fronts = list[tuple[Progress, Front]]


class LayersBackend:
    tokens_ahead = 0

    def __init__(self, model: Nvium, cache: PagedCache, cause: str | None = None) -> None:
        """`cause`: why no faster backend runs the passes, which are then counted; None for a reference."""
        self.cause = cause
        self.eager_passes = Counter[str]()
        """Number of passes by their cause."""
        self.model = model
        self.cache = cache
        self.num_blocks = model.config.num_exits
        self.inputs = Inputs(cache, model.config)

    @property
    def instructions(self) -> str | None:
        return None

    def prepare(self, config: EngineConfig) -> None:
        """Nothing to prepare."""

    @torch.inference_mode()
    def run(self, step: Step, max_rows: int) -> StepResult:
        reports = list[StepReport]()
        parts = [Progress(run, list(run.sequence.filled), run.sequence.log_reached) for run in step.runs]
        for blocks in step.passes:
            going = [part for part in parts if not part.emissions and part.rows(blocks[-1]).rows]
            num_rows = sum(len(part.rows(blocks[0]).rows) for part in going)
            if blocks.start > step.blocks.start and num_rows > max_rows:
                break
            if going:
                reports += self.pass_blocks(step, blocks, going)
        to_score = [self._rows_to_score(part) for part in parts]
        found = scores(self.model, self.cache.states_NSD, [row for rows in to_score for row in rows])
        outcomes = [
            Outcome(part.filled, part.log_reached, part.emissions, list(islice(found, len(rows))))
            for part, rows in zip(parts, to_score, strict=True)
        ]
        return StepResult(outcomes, reports)

    def pass_blocks(self, step: Step, blocks: range, parts: list[Progress]) -> Iterable[StepReport]:
        """Run the rows through these blocks of the Step, then decide which front rows emit."""
        started, num_rows = time.perf_counter(), list[int]()
        if self.cause is not None:
            if self.cause not in self.eager_passes:
                logger.info("passes run in PyTorch's operators: %s", self.cause)
            self.eager_passes[self.cause] += 1
        fronts = self.fronts(blocks, parts)
        for block in blocks:
            rows = [each for part in parts if (each := part.rows(block)).rows]
            if rows:
                self.forward(block, rows)
            num_rows.append(sum(len(each.rows) for each in rows))
        for part in parts:
            part.pass_rows(blocks, part.run.stop)
        for first in range(0, len(fronts), MAX_FRONTS):
            self._decide(blocks, fronts[first : first + MAX_FRONTS])
        seconds = (time.perf_counter() - started) / len(blocks)
        return [StepReport(block + 1, 1, rows, seconds) for block, rows in zip(blocks, num_rows, strict=True) if rows]

    def forward(self, block: int, rows: Items[Rows]) -> None:
        backbone, cache = self.model.model, self.cache
        tokens = np.array(tokens_of(rows) if block == 0 else [], np.int64)
        slot_R, position_R, token_R = upload_all(cache.keys.device, cache.slots(rows), positions(rows), tokens)
        h_RD = cache.states_NSD[block - 1, slot_R] if block else backbone.embed_tokens(token_R)
        rotary = backbone.rotary_emb(position_R, h_RD.dtype)
        attend = self.attend(rows, slot_R)
        cache.states_NSD[block, slot_R] = backbone.run(h_RD, self.model.config.blocks[block], rotary, attend)

    def attend(self, rows: Items[Rows], slot_R: Tensor) -> Attend:
        return written(self.cache, slot_R, ragged(self.cache, rows))

    def fronts(self, blocks: range, parts: Items[Progress]) -> Fronts:
        """Return the rows whose next token is decided after these blocks: front rows, and rows to verify."""
        return [(part, self._front(part, row)) for part in parts for row in self._rows_to_decide(part.run, blocks)]

    def _front(self, part: Progress, row: int) -> Front:
        sequence, stop = part.run.sequence, part.run.stop
        first = sum(done >= stop for done in sequence.filled) if row < stop else 0
        return Front(sequence, row, self._slots(sequence, range(row, row + 1))[0], first)

    def _rows_to_decide(self, run: Run, blocks: range) -> range:
        if run.sequence.is_original:
            return range(run.sequence.first_verified, run.stop if blocks.stop == self.num_blocks else 0)
        return range(run.stop - 1, run.stop if run.reaches_front else 0)

    def _decide(self, blocks: range, fronts: Fronts) -> None:
        own = [front for _, front in fronts]
        variant = self.inputs.variant(own, is_last=blocks.stop == self.num_blocks)
        buffer = torch.zeros(self.inputs.num_words(variant), dtype=torch.long)
        words = upload(self.inputs.write(buffer, variant, [], own), self.cache.keys.device)
        record_answers(fronts, self.decided(blocks, self.inputs.views(words, variant), variant))

    def decided(self, blocks: range, inputs: InputViews, variant: Variant) -> Tensor:
        """Return the answers of `decide` for these fronts, [4, F]."""
        return decide(self.model, self.cache.states_NSD, blocks, inputs, variant)

    def _rows_to_score(self, part: Progress) -> list[ScoredRow]:
        """Return the rows that have just passed the last block, if their scores are asked for."""
        sequence = part.run.sequence
        rows = range(max(sequence.first_scored, sequence.filled[-1]), part.filled[-1])
        emitted = [max(0, emission.token_id) for emission in part.emissions[:1]]
        targets = [*sequence.token_ids, *emitted][rows.start + 1 : rows.stop + 1] if rows else []
        wanted = sequence.params.logprobs or 0, sequence.is_original
        return [ScoredRow(*own, *wanted) for own in zip(self._slots(sequence, rows), targets, strict=True)]

    def _slots(self, sequence: Sequence, rows: range) -> list[int]:
        return slots(sequence, rows, self.cache.page_size)


def record_answers(fronts: Fronts, answers_4F: Tensor) -> None:
    for (part, front), answers in zip(fronts, answers_4F[:, : len(fronts)].T.tolist(), strict=True):
        part.record(front.row, *answers)
