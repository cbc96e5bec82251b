"""Steps of few rows: their block, and the junction for the fronts that draw from exits as they are.

Shapes: R rows and F fronts with their padding, W pages of a table, D width, V vocabulary, S cache slots.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from nvium_core.engine.device.adjustments import is_adjusted
from nvium_core.engine.device.graphs.attention import MOST_GATHERED_KEYS, best_attention, gathered
from nvium_core.engine.device.graphs.inputs import FRONT_SLOT, MOST_ROWS, POSITION, SLOT, TOKEN, UNIFORM, Inputs, Shape
from nvium_core.engine.device.graphs.replay import Replay
from nvium_core.engine.device.junction import Junction
from nvium_core.engine.device.layers.attention import PagedAttention
from nvium_core.engine.device.sampling import NO_TOKEN, draw
from nvium_core.engine.schedule.front import Front
from nvium_core.engine.schedule.scheduler import Step
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM

LIGHT_HEAD_BYTES = 32 * 2**20
"""A head that is read about as fast as an answer comes back, at 1.5 TB/s and 20 µs. Assumed, not measured."""

MANY_FRONTS = 4
"""So many that one is likely to speak, and the head to be read for it anyway."""

LOG_CONTINUE, LOG_EXIT, SPOKEN = range(3)


class StaticSteps:
    """Runs Steps that it `suits`, and answers for those of their fronts that draw from exits as they are.

    Speaking *at once* means that the head and the draw run for every front before the router's answer is known here,
    and all comes back in one copy; the tokens of those that go on are dropped. It costs reading the head where nobody
    speaks, so it is done where everybody speaks, where somebody most likely does and where the head is small.
    Otherwise the router's answer comes first, and a second copy brings the tokens if there are any.
    """

    def __init__(self, model: NviumForCausalLM, cache: PagedAttention, states_2SD: Tensor) -> None:
        config, head = model.config, model.lm_head.weight
        self._model = model
        self._cache = cache
        self._states_2SD = states_2SD
        self._last_block = config.num_exits - 1
        self._attention = best_attention(cache, config.num_attention_heads)
        most_pages = -(-min(config.max_position_embeddings, cache.null_slot) // cache.page_size)
        self._inputs = Inputs(cache, most_pages=most_pages, device=head.device)
        self._x_FD = head.new_zeros(MOST_ROWS, config.hidden_size)
        self._answers = torch.zeros(3, MOST_ROWS, dtype=torch.float64, device=head.device)
        self._told = torch.zeros(3, MOST_ROWS, dtype=torch.float64, pin_memory=head.is_cuda)
        """The answers, here."""
        self._has_light_head = head.nbytes <= LIGHT_HEAD_BYTES
        self._replay = Replay(head.device)

    def suits(self, step: Step) -> bool:
        """Whether there is room for the Step."""
        if step.num_rows > MOST_ROWS:
            return False
        shape = self._shape(step)
        num_keys = shape.num_rows * shape.num_pages * self._cache.page_size
        return self._attention is not gathered or num_keys <= MOST_GATHERED_KEYS

    @torch.inference_mode()
    def run(self, step: Step) -> dict[Sequence, Junction]:
        """Carry the Step, and answer for the fronts that draw from exits as they are."""
        self.carry(step)
        return self.ask(step)

    def carry(self, step: Step) -> None:
        """Take the rows from the boundary before the block to the one behind it. Sends what `ask` needs, too."""
        shape = self._shape(step)
        self._inputs.send(step, plain_fronts(step), shape)
        name = ("block", step.block, shape.num_rows, shape.num_pages)
        self._replay.run(name, partial(self.run_block, step.block, shape))

    def ask(self, step: Step) -> dict[Sequence, Junction]:
        """Answers for the fronts that draw from exits as they are, of the Step that was carried last."""
        sequences = plain_fronts(step)
        if not sequences:
            return {}
        num_fronts = self._shape(step).num_fronts
        ranks = any(s.params.top_k or s.params.top_p < 1 for s in sequences)
        self._replay.run(("route", step.block, num_fronts), partial(self.route, step.block, num_fronts))
        speak = partial(self.speak, step.block, num_fronts, ranks=ranks)
        is_at_once = self._speaks_at_once(step.block, len(sequences))
        if is_at_once:
            self._replay.run(("speak", step.block, num_fronts, ranks), speak)
        fronts = self._fronts(sequences, step.block)
        if not is_at_once and any(front.is_sane and front.is_routed for front in fronts):
            self._replay.run(("speak", step.block, num_fronts, ranks), speak)
            self._told.copy_(self._answers)
        return {front.sequence: self._junction(front) for front in fronts}

    def run_block(self, block: int, shape: Shape) -> None:
        """Everything between the inputs and the next boundary."""
        backbone, num_rows = self._model.model, shape.num_rows
        slot_R, position_R = self._inputs.whole(SLOT, num_rows), self._inputs.whole(POSITION, num_rows)
        if block:
            h_RD = self._states_2SD[block % 2, slot_R]
        else:
            h_RD = backbone.embed_tokens(self._inputs.whole(TOKEN, num_rows))
        attend = self._attention(self._cache, self._inputs.tables(shape), position_R, slot_R)
        rotary = backbone.rotary(position_R, h_RD.dtype)
        h_RD = backbone.run(h_RD, self._model.config.blocks[block], rotary, attend)
        self._states_2SD[(block + 1) % 2, slot_R] = h_RD

    def route(self, block: int, num_fronts: int) -> None:
        """The router's answers."""
        h_FD = self._states_2SD[(block + 1) % 2, self._inputs.whole(FRONT_SLOT, num_fronts)]
        exit_ = cast(Exit, self._model.exits[block])
        x_FD = exit_.norm(h_FD)
        log_w_F2 = exit_.route(x_FD)
        self._x_FD[:num_fronts] = x_FD
        self._answers[LOG_CONTINUE, :num_fronts] = log_w_F2[:, CONTINUE]
        self._answers[LOG_EXIT, :num_fronts] = log_w_F2[:, EXIT]

    def speak(self, block: int, num_fronts: int, *, ranks: bool) -> None:
        """A token of every front."""
        o_FD = cast(Exit, self._model.exits[block]).adapter(self._x_FD[:num_fronts])
        logits_FV = self._model.lm_head(o_FD)
        truncation = self._inputs.truncation(num_fronts, ranks=ranks)
        self._answers[SPOKEN, :num_fronts] = draw(logits_FV, truncation, self._inputs.real(UNIFORM, num_fronts))

    def _shape(self, step: Step) -> Shape:
        return self._inputs.shape(step, has_one_width=self._attention is not gathered)

    def _speaks_at_once(self, block: int, num_fronts: int) -> bool:
        return block == self._last_block or num_fronts >= MANY_FRONTS or self._has_light_head

    def _fronts(self, sequences: list[Sequence], block: int) -> list[Front]:
        """With the router's answers, for which the device is waited for."""
        self._told.copy_(self._answers)
        log_continue, log_exit, _ = self._told[:, : len(sequences)].tolist()
        return [
            Front(sequence, row, block, log_exit=log_exit[row], log_continue=log_continue[row])
            for row, sequence in enumerate(sequences)
        ]

    def _junction(self, front: Front) -> Junction:
        if not front.is_sane:
            return Junction(NO_TOKEN, front.log_exit, front.log_continue)
        token = int(self._told[SPOKEN, front.row]) if front.is_routed else None
        return Junction(token, front.log_exit, front.log_continue)


def plain_fronts(step: Step) -> list[Sequence]:
    """Whose fronts the Step reaches and who draw from exits as they are."""
    return [run.sequence for run in step.runs if run.reaches_front and draws_plainly(run.sequence)]


def draws_plainly(sequence: Sequence) -> bool:
    """Whether its tokens are drawn from exits, with nothing done to logits but temperature and truncation."""
    is_summed = sequence.params.sampling == "mixture" or sequence.params.is_greedy
    return not (is_summed or is_adjusted(sequence))
