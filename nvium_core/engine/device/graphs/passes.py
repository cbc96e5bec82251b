"""Whole passes: a row of each sequence through all blocks in one graph. Routers are decided on the device, each row is
normed at its own exit, and one head and one draw follow.

The next pass is launched before the last one's tokens are known here: everything it needs but the tokens follows from
positions, and these it takes from the last pass where they are. It is what comes next only if the scheduler says so;
otherwise it is dropped. A sequence that has stopped then has an unused row in it. That row wrote to its own slot, which
no other sequence reads: a page is published only with rows that were recorded, and a freed page is written by its next
owner later in the device's queue.

Shapes: R rows with their padding, N blocks, D width, V vocabulary.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.device.attention import RowAttention
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.graphs.inputs import (
    MAX_ROWS,
    POSITION,
    SLOT,
    SOURCE,
    TOKEN,
    UNIFORM,
    Inputs,
    PaddedSizes,
)
from nvium_core.engine.device.graphs.replay import Graph, Replay
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.sampling import NOT_DRAWN, draw_unread
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import GOES_ON, NO_TOKEN, Run, Step, StepResult, decide_together
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM


@dataclass(frozen=True)
class Flight:
    """A pass that was launched. Its answers are `told` once the fence is passed.

    `pages` are the lists that sequences had then: an admission gives a new one, which then only grows.
    """

    row_of: dict[Sequence, int]
    positions: list[int]
    pages: list[list[int]]
    told: Tensor
    fence: Fence


EXIT_TAKEN, EMITTED, LOG_W = range(3)
"""Of each row: the exit, the token, and two rows of log of the probability to have come to the exit, and to go on
(`CONTINUE`) or emit (`EXIT`) there."""


class Passes:
    def __init__(
        self, model: NviumForCausalLM, cache: PagedCache, inputs: Inputs, replay: Replay, attention: RowAttention
    ) -> None:
        self.model = model
        self.cache = cache
        self.inputs = inputs
        self.replay = replay
        self.attention = attention
        self.num_ahead = 0
        """Passes that were launched ahead and asked for."""
        head, self._num_blocks = model.lm_head.weight, model.config.num_exits
        shape = LOG_W + 2, MAX_ROWS
        self.answers = torch.zeros(shape, dtype=torch.float64, device=head.device)
        self._last_tokens = torch.zeros(MAX_ROWS, dtype=torch.float64, device=head.device)
        self.told = [torch.zeros(shape, dtype=torch.float64, pin_memory=head.is_cuda) for _ in range(2)]
        """Answers on the host: of the pass that is waited for, and of the one behind it."""
        self._fences = [inputs.make_fence(head.device) for _ in range(2)]
        self._ahead: Flight | None = None
        self._emitted_last: dict[Sequence, int] = {}
        """What each sequence of the pass before emitted, if nothing else has run since."""

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def suits(self, step: Step) -> bool:
        """A row of each sequence for every block, of sequences whose tokens are drawn plainly."""
        count, steps = len(step.runs), [step]
        while following := steps[-1].following:
            steps.append(following)
        is_whole = step.goes_on_anyway and step.block == 0 and len(steps) == self._num_blocks
        return (
            is_whole
            and all(each.num_rows == count for each in steps)
            and False not in [run.reaches_front for run in step.runs]
            and True in [run.sequence.is_plain for run in step.runs]
        )

    def forget(self) -> None:
        """Something else runs: what was launched ahead is dropped."""
        self._ahead = None
        self._emitted_last = {}

    @torch.inference_mode()
    def run(self, step: Step) -> list[StepResult]:
        flight, self._ahead = self._ahead, None
        if flight is not None and self._is_next(flight, step.runs):
            self.num_ahead += 1
        else:
            flight = self._launch(step, [-1] * len(step.runs))
        if False not in [run.sequence in self._emitted_last for run in step.runs]:
            self._ahead = self._launch_next(step.runs, flight)
        self._emitted_last = {}
        flight.fence.wait()
        return self._results(step, flight)

    def _is_next(self, flight: Flight, runs: Items[Run]) -> bool:
        """The pass has these rows, with these tokens, in these pages."""
        row_of, positions, pages, tokens = flight.row_of, flight.positions, flight.pages, self._emitted_last
        for sequence, rows, _ in runs:
            row, position = row_of.get(sequence), rows.start
            if row is None or positions[row] != position or pages[row] is not sequence.pages:
                return False
            if tokens.get(sequence) != sequence.token_ids[position]:
                return False
        return True

    def _launch_next(self, runs: Items[Run], flight: Flight) -> Flight | None:
        """The pass behind this one, without those who certainly end; None where a page or a token is missing."""
        going_on, page_size = list[Run](), self.cache.page_size
        for sequence, rows, _ in runs:
            if not sequence.is_plain:
                return None
            if len(sequence.token_ids) + 1 < sequence.max_length:
                if rows.stop >= len(sequence.pages) * page_size:
                    return None
                going_on.append(Run(sequence, range(rows.stop, rows.stop + 1), reaches_front=True))
        if not going_on:
            return None
        return self._launch(Step(0, going_on), [flight.row_of[sequence] for sequence, _, _ in going_on])

    def _launch(self, step: Step, sources: Items[int]) -> Flight:
        sizes, is_ranked = self.inputs.sizes(step), any(is_sorted(run.sequence) for run in step.runs)
        self._last_tokens.copy_(self.answers[EMITTED])
        self.inputs.send_pass(step, sources, sizes)
        self.replay.run(*self.graph(sizes, is_ranked))
        self.told.reverse()
        self._fences.reverse()
        self.told[0].copy_(self.answers, non_blocking=True)
        self._fences[0].set()
        row_of = {run.sequence: row for row, run in enumerate(step.runs)}
        positions, pages = [rows.start for _, rows, _ in step.runs], [run.sequence.pages for run in step.runs]
        return Flight(row_of, positions, pages, self.told[0], self._fences[0])

    def graph(self, sizes: PaddedSizes, is_ranked: bool) -> Graph:
        name = "pass", sizes.num_rows, sizes.num_pages, is_ranked
        return name, partial(self.replay_pass, sizes, is_ranked=is_ranked)

    def replay_pass(self, sizes: PaddedSizes, *, is_ranked: bool) -> None:
        backbone, num_rows = self.model.model, sizes.num_rows
        whole, real = self.inputs.whole, self.inputs.real
        slot_R, position_R, source_R = (whole(name, num_rows) for name in (SLOT, POSITION, SOURCE))
        drawn_R = self._last_tokens[source_R.clamp(min=0)].long().clamp(min=0)
        h_RD = backbone.embed_tokens(torch.where(source_R < 0, whole(TOKEN, num_rows), drawn_R))
        attend = self.attention(self.cache, self.inputs.tables(sizes), position_R, slot_R)
        rotary = backbone.rotary(position_R, h_RD.dtype)
        o_RD, uniform_R = torch.zeros_like(h_RD), real(UNIFORM, num_rows)
        is_open_R, exit_R = position_R >= 0, torch.zeros_like(position_R)
        log_R2 = uniform_R.new_zeros(num_rows, 2)
        for block, layers in enumerate(self.model.config.blocks):
            h_RD = backbone.run(h_RD, layers, rotary, attend)
            self.cache.states_behind(block)[slot_R] = h_RD
            exit_ = cast(Exit, self.model.exits[block])
            x_RD = exit_.norm(h_RD)
            log_w_R2 = exit_.route(x_RD).double()
            log_R2 = torch.where(is_open_R[:, None], log_R2[:, CONTINUE, None] + log_w_R2, log_R2)
            exits_R = is_open_R & (real(UNIFORM + self._num_blocks + block, num_rows) < log_w_R2[:, EXIT].exp())
            is_open_R = is_open_R & ~exits_R
            o_RD = torch.where(exits_R[:, None], exit_.adapter(x_RD), o_RD)
            exit_R = torch.where(exits_R, block, exit_R)
            uniform_R = torch.where(exits_R, real(UNIFORM + block, num_rows), uniform_R)
        truncation = self.inputs.truncation(num_rows, is_ranked=is_ranked)
        token_R = draw_unread(self.model.lm_head(o_RD), truncation, uniform_R)
        self.answers[EXIT_TAKEN, :num_rows] = exit_R
        self.answers[EMITTED, :num_rows] = token_R
        self.answers[LOG_W:, :num_rows] = log_R2.T

    def _results(self, step: Step, flight: Flight) -> list[StepResult]:
        """Of each block. Fronts that are not drawn plainly, and those for which the candidates were not enough, are
        left to the caller, their states being in the cache."""
        outcomes = dict(zip(flight.row_of, self._outcomes(flight), strict=True))
        fronts = [each for each, _, _ in step.runs if each.is_plain and outcomes[each][1] != NOT_DRAWN]
        results = self._undecided(step, is_complete=len(fronts) == len(step.runs))
        decide_together(results, fronts, [outcomes[sequence] for sequence in fronts])
        if not results[0].is_complete:
            tell_who_goes_on(results, fronts)
        self._emitted_last = {sequence: outcomes[sequence][1] for sequence in fronts}
        return results

    def _undecided(self, step: Step, *, is_complete: bool) -> list[StepResult]:
        """Of the Steps of a pass."""
        results, each = list[StepResult](), step
        for _ in range(self._num_blocks):
            results.append(StepResult(each, is_complete=is_complete))
            each = each.following or each
        return results

    def _outcomes(self, flight: Flight) -> Iterator[tuple[int, int, float, float]]:
        """Of each row, for `decide_together`."""
        for exit_taken, token, log_continue, log_exit in flight.told[:, : len(flight.row_of)].T.tolist():
            emitted = NO_TOKEN if math.isnan(log_exit + log_continue) else int(token)
            yield int(exit_taken), emitted, log_exit, log_continue


def tell_who_goes_on(results: list[StepResult], fronts: Items[Sequence]) -> None:
    """Decisions for each Step by itself, so that only the other fronts are still to be asked."""
    going = set(fronts)
    for result in results:
        going -= result.decisions.keys()
        result.decisions |= dict.fromkeys(going, GOES_ON)
        result.num_going_on = 0


def is_sorted(sequence: Sequence) -> bool:
    """Its token is drawn in the pass, from sorted tokens."""
    return sequence.is_plain and sequence.draw.is_ranked
