"""The junction after a block: which front rows speak, and which tokens.

The router's answer comes to the host, and there every front goes one of three ways:
- drawn from exits, it speaks if its uniform says so, from f(π_k);
- at temperature 0, it speaks as soon as no later exit can change the argmax of Σ p_k g(π_k);
- drawn from the mixture, it speaks at the last exit, from f(π_mix).

Shapes: F front rows, R some of them, D width, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial
from itertools import compress
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nvium_core.engine.device.adjustments import adjust
from nvium_core.engine.device.layers.exits import Exits
from nvium_core.engine.device.partial_mixture import PartialMixtures
from nvium_core.engine.device.sampling import NO_TOKEN, certified_argmax, draw_tokens
from nvium_core.engine.schedule.front import Front
from nvium_core.engine.schedule.randomness import TOKEN
from nvium_core.engine.schedule.scheduler import Step
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.exits import CONTINUE, EXIT, Exit
from nvium_core.model.nvium import NviumForCausalLM

MOST_SUMMED_ROWS = 256
"""Distributions that are summed at once, which bounds the memory of their float64 copies."""

Spoken = dict[int, int]
"""Tokens by the row that spoke them."""


class Junction(NamedTuple):
    """What one front row did: the token it spoke, if any, and the router's log-probabilities.

    `NO_TOKEN` is spoken where the model produced NaN or infinities.
    """

    token_id: int | None
    log_exit: float
    log_continue: float


class Answered(NamedTuple):
    """A Step whose rows have passed its block, and the answers that fronts were given on the way.

    `seconds` are None where nobody took them.
    """

    step: Step
    answers: dict[Sequence, Junction]
    seconds: float | None = None


class Junctions:
    """The model's exits, asked for many sequences at once."""

    def __init__(self, model: NviumForCausalLM, exits: Exits, *, max_sequences: int) -> None:
        self._model = model
        self._exits = exits
        self._device = model.device
        self._last_block = model.config.num_exits - 1
        self._mixtures = PartialMixtures(model, max_sequences=max_sequences)

    def ask(self, block: int, sequences: Items[Sequence], slots: Items[int]) -> list[Junction]:
        """One answer per front row, given the slots of their hidden states behind the block."""
        x_FD, log_w = self._exits.route(block, slots)
        fronts = [
            Front(sequence, row, block, log_exit=log_w[row][EXIT], log_continue=log_w[row][CONTINUE])
            for row, sequence in enumerate(sequences)
        ]
        spoken = self._speak(fronts, block, x_FD)
        return [Junction(spoken.get(front.row), front.log_exit, front.log_continue) for front in fronts]

    def _speak(self, fronts: list[Front], block: int, x_FD: Tensor) -> Spoken:
        sane = [front for front in fronts if front.is_sane]
        drawing = [front for front in sane if not front.needs_mixture and front.is_routed]
        summing = [front for front in sane if front.needs_mixture]
        spoken = {front.row: NO_TOKEN for front in fronts if not front.is_sane}
        if drawing:
            rows, speakers = [front.row for front in drawing], [front.sequence for front in drawing]
            uniforms = [front.uniform(TOKEN) for front in drawing]
            tokens = self._exits.draw(block, x_FD, rows, speakers, uniforms)
            spoken |= zip(rows, tokens, strict=True)
        if summing:
            adapter = cast(Exit, self._model.exits[block]).adapter
            o_RD = adapter(x_FD[self._rows(summing)].to(self._model.dtype))
            exit_prob_R = self._float64([front.exit_probability for front in summing])
            self._mixtures.keep(block, self._seats(summing), o_RD, exit_prob_R)
            spoken |= self._speak_for_mixture(summing)
        return spoken

    def _speak_for_mixture(self, fronts: list[Front]) -> Spoken:
        """Ask the head for those whose mixture may now decide, in portions of bounded memory."""
        block = fronts[0].block
        is_last = block == self._last_block
        deciding = [front for front in fronts if not front.samples_mixture and (is_last or front.may_be_certain)]
        complete = [front for front in fronts if front.samples_mixture and is_last]
        spoken: Spoken = {}
        for portion in portions([front for front in deciding if not front.might_have_been_certain], block + 1):
            spoken |= self._decide(portion, range(block + 1))
        for portion in portions([front for front in deciding if front.might_have_been_certain], 1):
            spoken |= self._decide(portion, range(block, block + 1))
        for portion in portions(complete, block + 1):
            spoken |= self._draw_from_mixture(portion)
        return spoken

    def _decide(self, fronts: list[Front], exits: range) -> Spoken:
        """Temperature 0: with the shares of these exits the mixture is m_k; its argmax where that is final."""
        g = partial(adjust, sequences=[front.sequence for front in fronts])
        mixture_RV = self._mixtures.add(exits, self._seats(fronts), g)
        token_R, certain_R = certified_argmax(mixture_RV, self._float64([front.remaining for front in fronts]))
        is_final = certain_R.tolist() if exits[-1] < self._last_block else [True] * len(fronts)
        return dict(compress(by_row(fronts, token_R), is_final))

    def _draw_from_mixture(self, fronts: list[Front]) -> Spoken:
        """A token from f(π_mix) for each row, log π_mix taking the place of logits."""
        log_mixture_RV = self._mixtures.add(range(self._last_block + 1), self._seats(fronts)).log()
        adjust(log_mixture_RV, [front.sequence for front in fronts])
        params = [front.sequence.params for front in fronts]
        tokens = draw_tokens(log_mixture_RV, params, [front.uniform(TOKEN) for front in fronts])
        return {front.row: token for front, token in zip(fronts, tokens, strict=True)}

    def _rows(self, fronts: list[Front]) -> Tensor:
        return torch.tensor([front.row for front in fronts], device=self._device)

    def _seats(self, fronts: list[Front]) -> Tensor:
        return torch.tensor([front.sequence.seat for front in fronts], device=self._device)

    def _float64(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def portions(fronts: list[Front], num_exits: int) -> Iterator[list[Front]]:
    """The fronts, so many at a time that the distributions of their exits are bounded in number."""
    size = max(1, MOST_SUMMED_ROWS // num_exits)
    return (fronts[start : start + size] for start in range(0, len(fronts), size))


def by_row(fronts: list[Front], token_R: Tensor) -> Iterator[tuple[int, int]]:
    """(row, token) of each front."""
    return zip([front.row for front in fronts], token_R.tolist(), strict=True)
