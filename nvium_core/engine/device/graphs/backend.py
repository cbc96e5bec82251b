"""Steps of few rows: their block, and decisions for fronts that draw plainly. Larger Steps go through the layers.

Shapes: R rows and F fronts with their padding, W pages of a table, D width, V vocabulary, S cache slots.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from nvium_core.engine.device.attention import MAX_GATHERED_KEYS, RowAttention, best_attention, gathered
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
from nvium_core.engine.device.graphs.replay import Replay
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.sampling import draw
from nvium_core.engine.schedule.routed_front import RoutedFront
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import NO_TOKEN, FrontDecision, Step, StepResult
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM

LIGHT_HEAD_BYTES = 32 * 2**20
"""A head that is read about as fast as an answer comes back, at 1.5 TB/s and 20 µs. Assumed, not measured."""

MANY_FRONTS = 4
"""So many that one is likely to exit, and the head to be read for it anyway."""

LOG_CONTINUE, LOG_EXIT, EMITTED = range(3)


class GraphsBackend(LayersBackend):
    """Drawing *at once* means that head and draw run for every front before the router's output is known here, and all
    comes back in one copy; the tokens of those that go on are dropped. It costs reading the head where nobody exits, so
    it is done where everybody exits, where somebody most likely does and where the head is small. Otherwise the
    router's output comes first, and a second copy brings the tokens if there are any.
    """

    def __init__(
        self,
        model: NviumForCausalLM,
        cache: PagedCache,
        *,
        light_head_bytes: int = LIGHT_HEAD_BYTES,
        attention: RowAttention | None = None,
        make_fence: Callable[[torch.device], Fence] = Fence,
    ) -> None:
        super().__init__(model, cache)
        config, head = model.config, model.lm_head.weight
        self._last_block = config.num_exits - 1
        self.attention = attention or best_attention(cache, config.num_attention_heads)
        max_pages = -(-min(config.max_position_embeddings, cache.null_slot) // cache.page_size)
        self.inputs = Inputs(
            cache, max_pages=max_pages, has_one_width=self.attention is not gathered, make_fence=make_fence
        )
        self._x_FD = head.new_zeros(MAX_ROWS, config.hidden_size)
        self._answers = torch.zeros(3, MAX_ROWS, dtype=torch.float64, device=head.device)
        self.told = torch.zeros(3, MAX_ROWS, dtype=torch.float64, pin_memory=head.is_cuda)
        """The answers, on the host."""
        self._has_light_head = head.nbytes <= light_head_bytes
        self.replay = Replay(head.device)

    def suits(self, step: Step) -> bool:
        """Whether the Step fits into the fixed buffers."""
        if step.num_rows > MAX_ROWS:
            return False
        sizes = self.inputs.sizes(step)
        num_keys = sizes.num_rows * sizes.num_pages * self.cache.page_size
        return self.attention is not gathered or num_keys <= MAX_GATHERED_KEYS

    @torch.inference_mode()
    def run(self, step: Step) -> list[StepResult]:
        if not self.suits(step):
            return super().run(step)
        sizes, sequences = self.inputs.sizes(step), plain_fronts(step)
        self.inputs.send(step, sequences, sizes)
        name = ("block", step.block, sizes.num_rows, sizes.num_pages)
        self.replay.run(name, partial(self.replay_block, step.block, sizes))
        return [StepResult(step, self._decisions(step.block, sequences, sizes.num_fronts) if sequences else {})]

    def _decisions(self, block: int, sequences: list[Sequence], num_fronts: int) -> dict[Sequence, FrontDecision]:
        is_ranked = any(sequence.draw.is_ranked for sequence in sequences)
        self.replay.run(("route", block, num_fronts), partial(self.replay_route, block, num_fronts))
        emit = partial(self.replay_draw, block, num_fronts, is_ranked=is_ranked)
        is_at_once = self._draws_at_once(block, len(sequences))
        if is_at_once:
            self.replay.run(("draw", block, num_fronts, is_ranked), emit)
        fronts = self._routed(sequences, block)
        if not is_at_once and any(front.is_sane and front.exits for front in fronts):
            self.replay.run(("draw", block, num_fronts, is_ranked), emit)
            self.told.copy_(self._answers)
        return {front.sequence: self._decision(front) for front in fronts}

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
        self._answers[LOG_CONTINUE, :num_fronts] = log_w_F2[:, CONTINUE]
        self._answers[LOG_EXIT, :num_fronts] = log_w_F2[:, EXIT]

    def replay_draw(self, block: int, num_fronts: int, *, is_ranked: bool) -> None:
        """A token for every front, whether it exits or not."""
        o_FD = cast(Exit, self.model.exits[block]).adapter(self._x_FD[:num_fronts])
        truncation = self.inputs.truncation(num_fronts, is_ranked=is_ranked)
        token_F = draw(self.model.lm_head(o_FD), truncation, self.inputs.real(UNIFORM, num_fronts))
        self._answers[EMITTED, :num_fronts] = token_F

    def _draws_at_once(self, block: int, num_fronts: int) -> bool:
        return block == self._last_block or num_fronts >= MANY_FRONTS or self._has_light_head

    def _routed(self, sequences: list[Sequence], block: int) -> list[RoutedFront]:
        """Waits for the device."""
        self.told.copy_(self._answers)
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
