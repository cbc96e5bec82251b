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
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

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
from nvium_core.engine.device.sampling import draw
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import NO_TOKEN, FrontDecision, Run, Step, StepResult
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM


class Place(NamedTuple):
    """Of a sequence in a pass."""

    row: int
    position: int
    slot: int


@dataclass(frozen=True)
class Flight:
    """A pass that was launched. Its answers are `told` once the fence is passed."""

    places: dict[Sequence, Place]
    told: Tensor
    fence: Fence


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
        self._exit, self._emitted = 2 * self._num_blocks, 2 * self._num_blocks + 1
        shape = (2 * self._num_blocks + 2, MAX_ROWS)
        self.answers = torch.zeros(shape, dtype=torch.float64, device=head.device)
        """log w of going on behind each block, log w of exiting there, the exit taken, and the token."""
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
            and all(run.reaches_front for run in step.runs)
            and any(run.sequence.draw.is_plain for run in step.runs)
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
        if all(run.sequence in self._emitted_last for run in step.runs):
            self._ahead = self._launch_next(step.runs, flight)
        self._emitted_last = {}
        flight.fence.wait()
        return self._results(step, flight)

    def _is_next(self, flight: Flight, runs: Items[Run]) -> bool:
        """The pass has these rows, with these tokens, in these slots."""
        places, tokens = flight.places, self._emitted_last
        return all(
            sequence in places
            and places[sequence][1:] == (rows.start, self._slot(sequence, rows.start))
            and tokens.get(sequence) == sequence.token_ids[rows.start]
            for sequence, rows, _ in runs
        )

    def _launch_next(self, runs: Items[Run], flight: Flight) -> Flight | None:
        """The pass behind this one, without those who certainly end; None where a page or a token is missing."""
        if not all(run.sequence.draw.is_plain for run in runs):
            return None
        going_on = [run for run in runs if run.sequence.num_tokens + 1 < run.sequence.max_length]
        room = [len(run.sequence.pages) * self.cache.page_size for run in going_on]
        if not going_on or any(run.rows.stop >= positions for run, positions in zip(going_on, room, strict=True)):
            return None
        rows = [range(run.rows.stop, run.rows.stop + 1) for run in going_on]
        step = Step(0, [run._replace(rows=own) for run, own in zip(going_on, rows, strict=True)])
        return self._launch(step, [flight.places[run.sequence].row for run in going_on])

    def _launch(self, step: Step, sources: Items[int]) -> Flight:
        sizes, is_ranked = self.inputs.sizes(step), any(is_sorted(run.sequence) for run in step.runs)
        self._last_tokens.copy_(self.answers[self._emitted])
        self.inputs.send_pass(step, sources, sizes)
        self.replay.run(*self.graph(sizes, is_ranked))
        self.told.reverse()
        self._fences.reverse()
        self.told[0].copy_(self.answers, non_blocking=True)
        self._fences[0].set()
        places = {
            run.sequence: Place(row, run.rows.start, self._slot(run.sequence, run.rows.start))
            for row, run in enumerate(step.runs)
        }
        return Flight(places, self.told[0], self._fences[0])

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
        for block, layers in enumerate(self.model.config.blocks):
            h_RD = backbone.run(h_RD, layers, rotary, attend)
            self.cache.states_behind(block)[slot_R] = h_RD
            exit_ = cast(Exit, self.model.exits[block])
            x_RD = exit_.norm(h_RD)
            log_w_R2 = exit_.route(x_RD).double()
            self.answers[block, :num_rows] = log_w_R2[:, CONTINUE]
            self.answers[self._num_blocks + block, :num_rows] = log_w_R2[:, EXIT]
            exits_R = is_open_R & (real(UNIFORM + self._num_blocks + block, num_rows) < log_w_R2[:, EXIT].exp())
            is_open_R = is_open_R & ~exits_R
            o_RD = torch.where(exits_R[:, None], exit_.adapter(x_RD), o_RD)
            exit_R = torch.where(exits_R, block, exit_R)
            uniform_R = torch.where(exits_R, real(UNIFORM + block, num_rows), uniform_R)
        token_R = draw(self.model.lm_head(o_RD), self.inputs.truncation(num_rows, is_ranked=is_ranked), uniform_R)
        self.answers[self._exit, :num_rows] = exit_R.double()
        self.answers[self._emitted, :num_rows] = token_R.double()

    def _results(self, step: Step, flight: Flight) -> list[StepResult]:
        """Of each block, whose fronts are those that have not emitted before. Those not drawn plainly are left to
        the caller, their states being in the cache."""
        going = [run.sequence for run in step.runs if run.sequence.draw.is_plain]
        is_complete = len(going) == len(step.runs)
        answers = flight.told[:, : len(flight.places)].tolist()
        results, each, decided = list[StepResult](), step, dict[Sequence, FrontDecision]()
        for block in range(self._num_blocks):
            decisions = {sequence: self._decision(answers, block, flight.places[sequence].row) for sequence in going}
            results.append(StepResult(each.without_fronts(decided), decisions, is_complete=is_complete))
            decided |= {sequence: made for sequence, made in decisions.items() if made.token_id is not None}
            going = [sequence for sequence in going if sequence not in decided]
            each = each.following or each
        self._emitted_last = {sequence: made.token_id or 0 for sequence, made in decided.items()}
        return results

    def _decision(self, answers: list[list[float]], block: int, row: int) -> FrontDecision:
        log_continue, log_exit = answers[block][row], answers[self._num_blocks + block][row]
        if math.isnan(log_continue + log_exit):
            return FrontDecision(NO_TOKEN, log_exit, log_continue)
        token = int(answers[self._emitted][row]) if answers[self._exit][row] == block else None
        return FrontDecision(token, log_exit, log_continue)

    def _slot(self, sequence: Sequence, position: int) -> int:
        page_size = self.cache.page_size
        return sequence.pages[position // page_size] * page_size + position % page_size


def is_sorted(sequence: Sequence) -> bool:
    """Its token is drawn in the pass, from sorted tokens."""
    return sequence.draw.is_plain and sequence.draw.is_ranked
