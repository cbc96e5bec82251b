"""Steps over fixed buffers: their block, and decisions for fronts that draw plainly; and whole passes. Long runs go
through the layers alone.

Shapes: R rows and F fronts with their padding, W pages of a table, D width, V vocabulary, S cache slots.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.device.attention import (
    RowAttention,
    best_attention,
    best_ragged,
    gathered,
    max_table,
    power_of_two,
)
from nvium_core.engine.device.graphs.fence import Fence
from nvium_core.engine.device.graphs.inputs import (
    FRONT_SLOT,
    MAX_ROWS,
    POSITION,
    SLOT,
    TOKEN,
    UNIFORM,
    Inputs,
    PaddedSizes,
)
from nvium_core.engine.device.graphs.passes import Passes
from nvium_core.engine.device.graphs.replay import Graph, Replay
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.sampling import MANY_CANDIDATES, NOT_DRAWN, draw_unread
from nvium_core.engine.schedule.routed_front import RoutedFront
from nvium_core.engine.schedule.scheduler import MAX_SHORT_RUN
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import NO_TOKEN, FrontDecision, Run, Step, StepResult
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.llama import Attend
from nvium_core.model.nvium import NviumForCausalLM

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0
"""About progress."""

LIGHT_HEAD_BYTES = 32 * 2**20
"""A head that is read about as fast as an answer comes back, at 1.5 TB/s and 20 µs. Assumed, not measured."""

MANY_FRONTS = 4
"""So many fronts that one is likely to exit, which needs the head anyway."""

LOG_CONTINUE, LOG_EXIT, EMITTED = range(3)


class GraphsBackend(LayersBackend):
    """Drawing *at once* means that head and draw run for every front before the router's output is known here, and all
    comes back in one copy; the tokens of those that go on are dropped. It costs reading the head where no front exits,
    so it is done where all exit, where one most likely does and where the head is small. Otherwise the router's output
    comes first, and a second copy brings the tokens if there are any.
    """

    def __init__(
        self,
        model: NviumForCausalLM,
        cache: PagedCache,
        *,
        light_head_bytes: int = LIGHT_HEAD_BYTES,
        num_candidates: int = MANY_CANDIDATES,
        attention: RowAttention | None = None,
        make_fence: Callable[[torch.device], Fence] = Fence,
    ) -> None:
        super().__init__(model, cache)
        with torch.no_grad():
            model.model.pack()
            for exit_ in model.exits[:-1]:
                exit_.router.to(torch.promote_types(model.dtype, torch.float32))  # converted once
        config, head = model.config, model.lm_head.weight
        self._last_block = config.num_exits - 1
        self.attention = attention or best_attention(cache, config.num_attention_heads)
        self.attend_runs = best_ragged(cache, config.num_attention_heads, self.attention)
        max_pages = -(-min(config.max_position_embeddings, cache.null_slot) // cache.page_size)
        self.inputs = Inputs(
            cache,
            num_blocks=config.num_exits,
            max_pages=max_pages,
            reads_in_place=self.attention is not gathered,
            max_table=max_table(self.attention, cache.page_size),
            num_candidates=num_candidates,
            make_fence=make_fence,
        )
        self._x_FD = head.new_zeros(MAX_ROWS, config.hidden_size)
        self.answers = torch.zeros(3, MAX_ROWS, dtype=torch.float64, device=head.device)
        self.told = torch.zeros(3, MAX_ROWS, dtype=torch.float64, pin_memory=head.is_cuda)
        """The answers, on the host."""
        self._has_light_head = head.nbytes <= light_head_bytes
        self.replay = Replay(head.device)
        self.passes = Passes(model, cache, self.inputs, self.replay, self.attention)

    @property
    def is_ahead(self) -> bool:
        return self.passes.is_ahead

    @torch.inference_mode()
    def prepare(self, max_rows: int, max_sequences: int) -> None:
        """Capture every graph that Steps of up to max_rows rows may need, so that none is captured while serving."""
        if not self.replay.captures:
            return
        max_rows = min(max_rows, MAX_ROWS, MAX_SHORT_RUN * max_sequences)
        graphs = list(self._graphs(power_of_two(max_rows), power_of_two(max_sequences)))
        started = told_at = time.monotonic()
        logger.info("capturing %d CUDA graphs", len(graphs))
        for number, (sizes, name, function) in enumerate(graphs):
            self.inputs.clear(sizes)
            self.replay.run(name, function)
            if time.monotonic() - told_at > SECONDS_BETWEEN_LINES:
                told_at = time.monotonic()
                logger.info("captured %d of %d CUDA graphs", number + 1, len(graphs))
        logger.info("captured %d CUDA graphs in %.1f s", len(graphs), time.monotonic() - started)

    def _graphs(self, max_rows: int, max_fronts: int) -> Iterator[tuple[PaddedSizes, Hashable, Callable[[], None]]]:
        """The largest first, whose memory the others then share."""
        blocks, kinds = range(self._last_block + 1), (False, True)
        for power in reversed(range(max_rows.bit_length())):
            count = 1 << power
            for width in self.inputs.widths:
                sizes = PaddedSizes(count, width, count)
                if self.inputs.fits(count, width * self.cache.page_size):
                    for is_ranked in kinds if count <= max_fronts else ():
                        yield sizes, *self.passes.graph(sizes, is_ranked)
                    for block in blocks:
                        yield sizes, *self._block_graph(block, sizes)
            sizes = PaddedSizes(count, self.inputs.widths[0], count)
            for block in blocks if count <= max_fronts else ():
                yield sizes, *self.route_graph(block, count)
                for is_ranked in kinds:
                    yield sizes, *self.draw_graph(block, count, is_ranked)

    def run(self, step: Step) -> list[StepResult]:
        flight = self.passes.launched(step)
        if flight is None:
            return [StepResult(step, self._run_block(step))]
        results = self.passes.results(step, flight)
        self.has_waited = True
        if len(flight.members.sequences) < len(step.runs):
            self._run_others(results, {*flight.members.sequences})
        return results

    def _run_others(self, results: list[StepResult], riding: set[Sequence]) -> None:
        """The rows that do not ride in a pass, block by block behind it. Nobody waits for them: their fronts are left
        to the caller."""
        for result in results:
            runs = [run for run in result.step.runs if run.sequence not in riding]
            self._run_block(Step(result.step.block, [run._replace(reaches_front=False) for run in runs]))

    def _run_block(self, step: Step) -> dict[Sequence, FrontDecision]:
        """And decisions for plain fronts, other than those of long runs."""
        decisions: dict[Sequence, FrontDecision] = {}
        parts = self.parts(step.runs)
        for runs in parts:
            decisions |= self._run_part(Step(step.block, runs))
        known = {run.sequence for runs in parts for run in runs}
        if rest := [run for run in step.runs if run.sequence not in known]:
            super().run(Step(step.block, rest))
            self.has_waited = False
        return decisions

    def parts(self, runs: list[Run]) -> list[list[Run]]:
        """Runs that fit into the buffers together; long ones, and those that do not fit alone, are left out."""
        lengths, longest = [len(run.rows) for run in runs], max([run.rows.stop for run in runs])
        if max(lengths) <= MAX_SHORT_RUN and self.inputs.fits(sum(lengths), longest):
            return [runs]
        parts, num_rows = [list[Run]()], 0
        for run in sorted(runs, key=lambda run: run.rows.stop):
            own = len(run.rows)
            if own <= MAX_SHORT_RUN and self.inputs.fits(own, run.rows.stop):
                if not self.inputs.fits(num_rows + own, run.rows.stop):
                    parts.append([])
                    num_rows = 0
                parts[-1].append(run)
                num_rows += own
        return [part for part in parts if part]

    def _run_part(self, step: Step) -> dict[Sequence, FrontDecision]:
        longest, sequences = max([run.rows.stop for run in step.runs]), plain_fronts(step)
        sizes = self.inputs.sizes(step.num_rows, longest, len(step.runs))
        self.inputs.send(step, sequences, sizes)
        self.replay.run(*self._block_graph(step.block, sizes))
        self.has_waited = bool(sequences)
        return self._decisions(step.block, sequences, sizes.num_fronts) if sequences else {}

    def attend(self, runs: Items[Run], position_R: Tensor, slot_R: Tensor) -> Attend:
        return self.attend_runs(self.cache, runs, slot_R)

    def _decisions(self, block: int, sequences: list[Sequence], num_fronts: int) -> dict[Sequence, FrontDecision]:
        is_ranked = any(sequence.draw.is_ranked for sequence in sequences)
        self.replay.run(*self.route_graph(block, num_fronts))
        is_at_once = self._draws_at_once(block, len(sequences))
        if is_at_once:
            self.replay.run(*self.draw_graph(block, num_fronts, is_ranked))
        fronts = self._routed(sequences, block)
        if not is_at_once and any(front.is_sane and front.exits for front in fronts):
            self.replay.run(*self.draw_graph(block, num_fronts, is_ranked))
            self.told.copy_(self.answers)
        decisions = {front.sequence: self._decision(front) for front in fronts}
        return {sequence: each for sequence, each in decisions.items() if each.token_id != NOT_DRAWN}

    def _block_graph(self, block: int, sizes: PaddedSizes) -> Graph:
        return ("block", block, sizes.num_rows, sizes.num_pages), partial(self.replay_block, block, sizes)

    def route_graph(self, block: int, num_fronts: int) -> Graph:
        return ("route", block, num_fronts), partial(self.replay_route, block, num_fronts)

    def draw_graph(self, block: int, num_fronts: int, is_ranked: bool) -> Graph:
        return ("draw", block, num_fronts, is_ranked), partial(self.replay_draw, block, num_fronts, is_ranked=is_ranked)

    def replay_block(self, block: int, sizes: PaddedSizes) -> None:
        """Everything between the inputs and the next boundary."""
        backbone, num_rows = self.model.model, sizes.num_rows
        slot_R, position_R = self.inputs.whole(SLOT, num_rows), self.inputs.whole(POSITION, num_rows)
        if block:
            h_RD = self.cache.states_behind(block - 1)[slot_R]
        else:
            h_RD = backbone.embed_tokens(self.inputs.whole(TOKEN, num_rows))
        attend = self.attention(self.cache, self.inputs.tables(sizes), position_R, slot_R)
        rotary = backbone.rotary(position_R, h_RD.dtype)
        h_RD = backbone.run(h_RD, self.model.config.blocks[block], rotary, attend)
        self.cache.states_behind(block)[slot_R] = h_RD

    def replay_route(self, block: int, num_fronts: int) -> None:
        h_FD = self.cache.states_behind(block)[self.inputs.whole(FRONT_SLOT, num_fronts)]
        exit_ = cast(Exit, self.model.exits[block])
        x_FD = exit_.norm(h_FD)
        log_w_F2 = exit_.route(x_FD)
        self._x_FD[:num_fronts] = x_FD
        self.answers[LOG_CONTINUE, :num_fronts] = log_w_F2[:, CONTINUE]
        self.answers[LOG_EXIT, :num_fronts] = log_w_F2[:, EXIT]

    def replay_draw(self, block: int, num_fronts: int, *, is_ranked: bool) -> None:
        """A token for every front, whether it exits or not."""
        o_FD = cast(Exit, self.model.exits[block]).adapter(self._x_FD[:num_fronts])
        truncation = self.inputs.truncation(num_fronts, is_ranked=is_ranked)
        token_F = draw_unread(self.model.lm_head(o_FD), truncation, self.inputs.real(UNIFORM + block, num_fronts))
        self.answers[EMITTED, :num_fronts] = token_F

    def _draws_at_once(self, block: int, num_fronts: int) -> bool:
        return block == self._last_block or num_fronts >= MANY_FRONTS or self._has_light_head

    def _routed(self, sequences: list[Sequence], block: int) -> list[RoutedFront]:
        """Waits for the device."""
        self.told.copy_(self.answers)
        log_continue, log_exit, _ = self.told[:, : len(sequences)].tolist()
        return [
            RoutedFront(sequence, row, block, sequence.log_reached, log_exit[row], log_continue[row])
            for row, sequence in enumerate(sequences)
        ]

    def _decision(self, front: RoutedFront) -> FrontDecision:
        if not front.is_sane:
            return FrontDecision(NO_TOKEN, front.log_exit, front.log_continue)
        token = int(self.told[EMITTED, front.row]) if front.exits else None
        return FrontDecision(token, front.log_exit, front.log_continue)


def plain_fronts(step: Step) -> list[Sequence]:
    """Sequences whose fronts the Step reaches and whose tokens are drawn plainly."""
    return [run.sequence for run in step.runs if run.reaches_front and run.sequence.draw.is_plain]
