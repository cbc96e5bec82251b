"""Runs Steps with PyTorch operators, for any device, precision and model. The reference for other backends.

Shapes: R rows of a block, D width.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from nvium_core.engine.device.attention import RunAttention, cached_attention, ragged
from nvium_core.engine.device.decide import GOES_ON, NOT_EMITTED, ScoredRow, decide, scores
from nvium_core.engine.device.inputs import MAX_FRONTS, Front, Inputs
from nvium_core.engine.device.paged_cache import PagedCache, positions, upload, upload_all
from nvium_core.engine.events import StepReport
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Backend, Emission, Outcome, Rows, Run, Step, StepResult
from nvium_core.model.nvium import Nvium

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Progress(Outcome):
    """A run during a Step, and then its outcome."""

    run: Run
    is_tied: bool = False

    def rows(self, block: int) -> Rows:
        return Rows(self.run.sequence, self.run.rows(block, self.filled, is_tied=self.is_tied))

    def pass_rows(self, blocks: range) -> None:
        stops = [self.rows(block).rows.stop for block in blocks]
        for block, stop in zip(blocks, stops, strict=True):
            self.filled[block] = max(self.filled[block], stop)

    def rows_to_decide(self, block: int) -> range:
        """Return the rows whose next tokens are decided after they have passed this block."""
        rows, run = self.rows(block).rows, self.run
        if run.sequence.is_original:
            return range(run.sequence.first_verified, rows.stop if block == len(self.filled) - 1 else 0)
        return rows[-1:] if run.reaches_front and rows.stop == run.stop else range(0)

    def record(self, row: int, exit_taken: float, token_id: float, log_p: float, log_continue: float) -> None:
        """Record a decision: the row continues or emits. Ignore it if the row follows a rejected draft."""
        sequence = self.run.sequence
        if sequence.is_original:
            drafts = sequence.token_ids[sequence.num_verified : row + 1]
            if [emission.token_id for emission in self.emissions[: len(drafts)]] != drafts:
                return
        if token_id == GOES_ON:
            self.log_reached = log_continue
        else:
            self.emissions.append(Emission(int(token_id), int(exit_taken), log_p))
            self.log_reached = 0.0


class LayersBackend(Backend):
    def __init__(self, model: Nvium, cache: PagedCache, cause: str | None = None) -> None:
        """`cause`: why no faster backend runs the passes, which are then counted; None for a reference."""
        self.cause = cause
        self.eager_passes: Counter[str] = Counter()
        """Number of passes by their cause."""
        self.attend_runs: RunAttention = ragged
        self.model = model
        self.cache = cache
        self.num_blocks = model.config.num_exits
        self.inputs = Inputs(cache, model.config)

    @torch.inference_mode()
    def run(self, step: Step, max_rows: int) -> StepResult:
        reports = list[StepReport]()
        is_tied = step.policy.is_tied
        parts = [
            Progress([*run.sequence.filled], run.sequence.log_reached, run=run, is_tied=is_tied) for run in step.runs
        ]
        for blocks in step.policy.passes(step.blocks):
            going = [part for part in parts if not part.emissions and part.filled[blocks[-1]] < part.run.stop]
            is_first = blocks.start == step.blocks.start
            if not is_first and sum(len(part.rows(blocks[0]).rows) for part in going) > max_rows:
                break
            if going:
                reports += self.pass_blocks(step, blocks, going)
        scored = [part for part in parts if part.run.sequence.needs_scores]
        to_score = [self._rows_to_score(part) for part in scored]
        found = scores(self.model, self.cache.states_NSD, [row for rows in to_score for row in rows])
        for part, rows in zip(scored, to_score, strict=True):
            part.scores = [*islice(found, len(rows))]
        return StepResult([*parts], reports)

    def pass_blocks(self, step: Step, blocks: range, parts: list[Progress]) -> Iterable[StepReport]:
        """Run the rows through these blocks of the Step, then decide which front rows emit."""
        started, num_rows = time.perf_counter(), list[int]()
        if self.cause is not None:
            self.count_eager(self.cause)
        decided = [range(block, block + 1) for block in blocks] if step.policy.is_tied else [blocks]
        fronts = [(passed, self.fronts(passed, parts)) for passed in decided]
        for block in blocks:
            rows = [each for part in parts if (each := part.rows(block)).rows]
            if rows:
                self.forward(block, rows)
            num_rows.append(sum(len(each.rows) for each in rows))
        for part in parts:
            part.pass_rows(blocks)
        for passed, own in fronts:
            for first in range(0, len(own), MAX_FRONTS):
                self._decide(passed, parts, own[first : first + MAX_FRONTS])
        seconds = (time.perf_counter() - started) / len(blocks)
        return [StepReport(block + 1, 1, rows, seconds) for block, rows in zip(blocks, num_rows, strict=True) if rows]

    def count_eager(self, cause: str) -> None:
        if cause not in self.eager_passes:
            logger.info("passes run in PyTorch's operators: %s", cause)
        self.eager_passes[cause] += 1

    def forward(self, block: int, rows: Items[Rows]) -> None:
        backbone, cache = self.model.model, self.cache
        known = (token for sequence, own in rows for token in sequence.token_ids[own.start : own.stop])
        tokens = np.array([*known] if block == 0 else [], np.int64)
        slot_R, position_R, token_R = upload_all(cache.keys.device, cache.slots(rows), positions(rows), tokens)
        h_RD = cache.states_NSD[block - 1, slot_R] if block else backbone.embed(token_R)
        rotary = backbone.rotary_emb(position_R, h_RD.dtype)
        attend = cached_attention(cache, slot_R, self.attend_runs(cache, rows))
        cache.states_NSD[block, slot_R] = backbone.run(h_RD, backbone.blocks[block], rotary, attend)

    def fronts(self, blocks: range, parts: Items[Progress]) -> list[Front]:
        rows = ((part, row) for part in parts for row in part.rows_to_decide(blocks[-1]))
        return [self.front(part.run.sequence, row, part.log_reached) for part, row in rows]

    def front(self, sequence: Sequence, row: int, log_reached: float = 0.0) -> Front:
        first = sum([done > row for done in sequence.filled]) if sequence.filled[0] > row else 0
        return Front(sequence, row, first, log_reached)

    def _decide(self, blocks: range, parts: Items[Progress], fronts: Items[Front]) -> None:
        variant = self.inputs.variant(fronts, is_last=blocks.stop == self.num_blocks)
        buffer = torch.zeros(self.inputs.num_words(variant), dtype=torch.long)
        words = upload(self.inputs.write(buffer, variant, [], fronts), self.cache.keys.device)
        views = self.inputs.views(words, variant)
        record_answers(parts, fronts, decide(self.model, self.cache.states_NSD, blocks, views, variant))

    def _rows_to_score(self, part: Progress) -> list[ScoredRow]:
        sequence = part.run.sequence
        is_due = sequence.is_scored_at_exit and part.emissions
        rows = range(max(sequence.num_scored, sequence.filled[-1]), part.run.stop if is_due else part.filled[-1])
        if not rows:
            return []
        emitted = [max(0, emission.token_id) for emission in part.emissions[:1]]
        targets = [*sequence.token_ids, *emitted][rows.start + 1 : rows.stop + 1]
        exits = [NOT_EMITTED] * (len(rows) - 1) + [part.emissions[0].block if is_due else NOT_EMITTED]
        own = zip(self.cache.slots([Rows(sequence, rows)]).tolist(), targets, exits, strict=True)
        return [ScoredRow(*each, sequence.draw, sequence.params.logprobs or 0) for each in own]


def record_answers(parts: Items[Progress], fronts: Items[Front], answers_4F: Tensor) -> None:
    """Record the decisions about these front rows, except those of sequences that have ended."""
    part_of = {part.run.sequence: part for part in parts}
    for front, answers in zip(fronts, answers_4F[:, : len(fronts)].T.tolist(), strict=True):
        if part := part_of.get(front.sequence):
            part.record(front.row, *answers)
