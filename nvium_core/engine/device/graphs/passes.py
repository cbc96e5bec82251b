"""Whole passes: a row of each sequence through all blocks in one graph. Routers are decided on the device, each row is
normed at its own exit, and one head and one draw follow.

The next pass is launched before the last one's tokens are known here: everything it needs but the tokens follows from
positions, and these it takes from the last pass where they are. It is what comes next only if the scheduler says so;
otherwise it is dropped. A sequence that has stopped then has an unused row in it. That row wrote to its own slot, which
no other sequence reads: a page is published only with rows that were recorded, and a freed page is written by its next
owner later in the device's queue.

Runs of more rows, such as a prompt's, do not ride in the graph; the backend takes them through the blocks behind it.

Shapes: R rows with their padding, N blocks, D width, V vocabulary.
"""

from collections.abc import Iterable
from functools import partial
from math import isnan
from operator import is_
from typing import NamedTuple, cast

import torch

from nvium_core.engine.device.attention import RowAttention
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
from nvium_core.engine.device.graphs.members import Members
from nvium_core.engine.device.graphs.replay import Graph, Replay
from nvium_core.engine.device.paged_cache import Integers, PagedCache
from nvium_core.engine.device.sampling import NOT_DRAWN, draw_unread
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import GOES_ON, NO_TOKEN, REACHES_FRONT, Run, Step, StepResult, decide_together
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM


class Flight(NamedTuple):
    """A pass that was launched for members of that age, and which of its answers are theirs. They are those of its
    `turn`, 0 or 1, and have come once that fence is passed."""

    members: Members
    age: int
    row_R: Integers
    turn: int
    sizes: PaddedSizes

    def part(self, rows: list[int]) -> "Flight":
        return Flight(self.members.part(rows), self.age, self.row_R[rows], self.turn, self.sizes)


EXIT_TAKEN, EMITTED, LOG_W = range(3)
"""Of each row, in words of 8 bytes: the exit, the token, and in float64 two rows of log of the probability to have come
to the exit, and to go on (`CONTINUE`) or emit (`EXIT`) there."""


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
        self.answers = torch.zeros(2, *shape, dtype=torch.long, device=head.device)
        """Of two passes in turns, so that running one again reads the same tokens of the one before."""
        self._log_w = self.answers[:, LOG_W:].view(torch.float64)
        self._answers_of = list(self.answers)
        self.told = [torch.zeros(shape, dtype=torch.long, pin_memory=head.is_cuda) for _ in range(2)]
        """Answers on the host: of the pass that is waited for, and of the one behind it."""
        self._whole = [told[:LOG_W].numpy() for told in self.told]
        self._real = [told[LOG_W:].view(torch.float64).numpy() for told in self.told]
        self._turn = 0
        self._fences = [inputs.make_fence(head.device) for _ in range(2)]
        self._ahead: Flight | None = None
        self._emitted_last: tuple[list[Sequence], list[int]] = [], []
        """Sequences of the pass before, if nothing else has run since, and what they emitted: all who could."""

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def launched(self, step: Step) -> Flight | None:
        """The pass that the Step asks for, launched unless it runs already, and often the one behind it. None, and what
        runs already is dropped, if no row of the Step can ride."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and step.repeats and len(ahead.row_R) == len(self._emitted_last[0]) == len(step.runs):
            self.num_ahead += 1
            self._ahead = self._launch_next(ahead)
            return ahead
        emitted = dict(zip(*self._emitted_last, strict=True))
        self._emitted_last = [], []
        riders = self._riders(step)
        if not riders:
            return None
        sequences, positions = [run.sequence for run in riders], [run.rows.start for run in riders]
        flight = ahead and self._asked(ahead, sequences, positions, emitted)
        self.num_ahead += flight is not None
        flight = flight or self._launch_first(Members.of(sequences, positions, self.cache.page_size))
        if all(map(emitted.__contains__, sequences)):
            self._ahead = self._launch_next(flight)
        return flight

    def _riders(self, step: Step) -> list[Run]:
        """Of a Step that goes through all blocks, the runs that one graph takes: those of one row, a front, in each
        block. The longest contexts are left out where there is no room for all. Empty if no token is drawn plainly."""
        runs, steps = step.runs, [step]
        while following := steps[-1].following:
            steps.append(following)
        if not step.goes_on_anyway or step.block or len(steps) < self._num_blocks:
            return []
        if [each.num_rows for each in steps] != [len(runs)] * self._num_blocks or False in map(REACHES_FRONT, runs):
            everywhere = zip(*(each.runs for each in steps), strict=True)
            runs = [own[0] for own in everywhere if all(len(run.rows) == 1 and run.reaches_front for run in own)]
        runs = self._that_fit(runs)
        return runs if True in [run.sequence.is_plain for run in runs] else []

    def _that_fit(self, runs: list[Run]) -> list[Run]:
        longest = max([run.rows.stop for run in runs], default=1)
        while not self.inputs.fits(len(runs), longest):
            runs = [run for run in runs if run.rows.stop < longest] or runs[: len(runs) // 2]
            longest = max([run.rows.stop for run in runs], default=1)
        return runs

    def _asked(
        self, flight: Flight, sequences: list[Sequence], positions: list[int], emitted: dict[Sequence, int]
    ) -> Flight | None:
        """Of the flight just these rows, if it has them all, with these tokens, in these pages."""
        if sequences != flight.members.sequences:
            row_of = {sequence: row for row, sequence in enumerate(flight.members.sequences)}
            if not row_of.keys() >= {*sequences}:
                return None
            flight = flight.part([row_of[sequence] for sequence in sequences])
        members, pages = flight.members, [sequence.pages for sequence in sequences]
        is_there = positions == (members.start_R + flight.age).tolist() and all(map(is_, members.pages, pages))
        tokens = [sequence.token_ids[-1] for sequence in sequences]
        return flight if is_there and tokens == list(map(emitted.get, sequences)) else None

    def _launch_first(self, members: Members) -> Flight:
        num_rows = len(members.sequences)
        return self._launch(members, self.inputs.sizes(num_rows, members.longest, num_rows))

    def _launch_next(self, flight: Flight) -> Flight | None:
        """The pass behind this one, without those who certainly end; None where a page or a token is missing."""
        age = flight.age + 1
        if age >= flight.members.first_end:
            flight = flight.part([row for row, end in enumerate(flight.members.ends) if end > age])
        members, num_rows = flight.members, len(flight.row_R)
        if not num_rows or not members.are_plain or not members.have_room(age):
            return None
        sizes = self.inputs.grown(flight.sizes, num_rows, members.longest + age)
        return None if sizes is None else self._launch(members, sizes, age, flight.row_R)

    def _launch(self, members: Members, sizes: PaddedSizes, age: int = 0, source_R: Integers | None = None) -> Flight:
        self._turn = turn = 1 - self._turn
        self.inputs.send_pass(members, age, source_R, sizes, turn)
        self.replay.run(*self.graph(sizes, members.are_ranked))
        self.told[turn].copy_(self._answers_of[turn], non_blocking=True)
        self._fences[turn].set()
        return Flight(members, age, members.rows, turn, sizes)

    def graph(self, sizes: PaddedSizes, is_ranked: bool) -> Graph:
        name = "pass", sizes.num_rows, sizes.num_pages, is_ranked
        return name, partial(self.replay_pass, sizes, is_ranked=is_ranked)

    def replay_pass(self, sizes: PaddedSizes, *, is_ranked: bool) -> None:
        backbone, inputs, num_rows = self.model.model, self.inputs, sizes.num_rows
        whole, real = inputs.whole, inputs.real
        slot_R, position_R, source_R = (whole(name, num_rows) for name in (SLOT, POSITION, SOURCE))
        drawn_R = self.answers.index_select(0, inputs.other_turn)[0, EMITTED, source_R.clamp(min=0)].clamp(min=0)
        h_RD = backbone.embed_tokens(torch.where(source_R < 0, whole(TOKEN, num_rows), drawn_R))
        attend = self.attention(self.cache, inputs.tables(sizes), position_R, slot_R)
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
        truncation = inputs.truncation(num_rows, is_ranked=is_ranked)
        token_R = draw_unread(self.model.lm_head(o_RD), truncation, uniform_R)
        told = (self.answers[:, EXIT_TAKEN], exit_R), (self.answers[:, EMITTED], token_R), (self._log_w, log_R2.T)
        for answers, own in told:
            answers[..., :num_rows].index_copy_(0, inputs.turn, own[None])

    def results(self, step: Step, flight: Flight) -> list[StepResult]:
        """Of each block, once they have come. Fronts that are not drawn plainly, those for which the candidates were
        not enough and those that do not ride are left to the caller, their states being in the cache."""
        self._emitted_last = [], []
        self._fences[flight.turn].wait()
        fronts, (exits, tokens, log_exit, log_continue) = flight.members.sequences, self._told(flight)
        outcomes = zip(exits, tokens, log_exit, log_continue, strict=True)
        is_complete = len(fronts) == len(step.runs) and flight.members.are_plain and NOT_DRAWN not in tokens
        results = self._undecided(step, is_complete=is_complete)
        if is_complete:
            decide_together(results, fronts, outcomes)
            self._emitted_last = fronts, tokens
        else:
            pairs = zip(fronts, outcomes, strict=True)
            told = {each: outcome for each, outcome in pairs if each.is_plain and outcome[1] != NOT_DRAWN}
            decide_together(results, list(told), told.values())
            tell_who_goes_on(results, told.keys())
            self._emitted_last = list(told), [token for _, token, _, _ in told.values()]
        return results

    def _undecided(self, step: Step, *, is_complete: bool) -> list[StepResult]:
        """Of the Steps of a pass."""
        results, each = list[StepResult](), step
        for _ in range(self._num_blocks):
            results.append(StepResult(each, is_complete=is_complete))
            each = each.following or each
        return results

    def _told(self, flight: Flight) -> tuple[list[int], list[int], list[float], list[float]]:
        """The exits, tokens, and log w of exiting and going on, of its rows."""
        exits, tokens = self._whole[flight.turn].take(flight.row_R, axis=1).tolist()
        log_w = self._real[flight.turn].take(flight.row_R, axis=1).tolist()
        log_exit, log_continue = log_w[EXIT], log_w[CONTINUE]
        if isnan(sum(log_exit) + sum(log_continue)):  # infinities are of one sign
            log_w_R2 = zip(log_exit, log_continue, strict=True)
            tokens = [NO_TOKEN if isnan(sum(log_w)) else token for token, log_w in zip(tokens, log_w_R2, strict=True)]
        return exits, tokens, log_exit, log_continue


def tell_who_goes_on(results: list[StepResult], fronts: Iterable[Sequence]) -> None:
    """Decisions for each Step by itself, so that only the other fronts are still to be asked."""
    going = set(fronts)
    for result in results:
        going -= result.decisions.keys()
        result.decisions |= dict.fromkeys(going, GOES_ON)
        result.num_going_on = 0
