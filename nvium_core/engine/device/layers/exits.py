"""The exits of a model, as junctions ask them: who leaves, and with which token.

Shapes: F front rows, R some of them, D width, S cache slots, V vocabulary.
"""

from collections.abc import Sequence as Items
from typing import Protocol, cast

import torch
from torch import Tensor

from nvium_core.engine.device.adjustments import adjust
from nvium_core.engine.device.sampling import draw_tokens
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.exits import Exit
from nvium_core.model.nvium import NviumForCausalLM


class Exits(Protocol):
    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        """Of the rows in these slots, behind the block: normed, [F, D], and log w of going on and of leaving."""

    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        """A token for each of these rows of them, from f of its logits."""


class PlainExits:
    """The model's own."""

    def __init__(self, model: NviumForCausalLM, states_2SD: Tensor) -> None:
        self._model = model
        self._states_2SD = states_2SD

    def route(self, block: int, slots: Items[int]) -> tuple[Tensor, list[list[float]]]:
        exit_ = cast(Exit, self._model.exits[block])
        x_FD = exit_.norm(self._states_2SD[(block + 1) % 2, self._tensor(slots)])
        return x_FD, exit_.route(x_FD).double().tolist()

    def draw(
        self, block: int, x_FD: Tensor, rows: Items[int], sequences: Items[Sequence], uniforms: Items[float]
    ) -> list[int]:
        o_RD = cast(Exit, self._model.exits[block]).adapter(x_FD[self._tensor(rows)])
        logits_RV = self._model.lm_head(o_RD).double()
        adjust(logits_RV, sequences)
        return draw_tokens(logits_RV, [sequence.params for sequence in sequences], uniforms)

    def _tensor(self, values: Items[int]) -> Tensor:
        return torch.tensor(values, device=self._states_2SD.device)
