"""The mixture so far of sequences that need it explicitly: m_k = Σ_{j≤k} p_j g(π_j).

Exits leave their head input here as they are passed. The head is evaluated where the sum is needed, for all exits
up to there together: reading its weights is what it costs, and distributions need not be kept. All by seat; a Step at
block k writes what belongs to k only, so it can be run again.

Shapes: E exits, J the first ones of them, S seats, R some of them, D width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nvium_core.model.nvium import NviumForCausalLM


class PartialMixtures:
    def __init__(self, model: NviumForCausalLM, *, max_sequences: int) -> None:
        config, weight = model.config, model.lm_head.weight
        self._head = model.lm_head
        self._output_ESD = weight.new_zeros(config.num_exits, max_sequences, config.hidden_size)
        self._exit_prob_ES = weight.new_zeros(config.num_exits, max_sequences, dtype=torch.float64)

    def keep(self, block: int, seats_R: Tensor, o_RD: Tensor, exit_prob_R: Tensor) -> None:
        """Take in what an exit says: o_k, which the head is applied to, and p_k."""
        self._output_ESD[block, seats_R] = o_RD
        self._exit_prob_ES[block, seats_R] = exit_prob_R

    def sum(self, block: int, seats_R: Tensor, g: Callable[[Tensor], None] | None = None) -> Tensor:
        """m_k [R, V] in float64, with the exits up to that behind the block. g changes logits [J, R, V] in place."""
        logits_JRV = self._head(self._output_ESD[: block + 1, seats_R]).double()
        if g is not None:
            g(logits_JRV)
        return (self._exit_prob_ES[: block + 1, seats_R, None] * logits_JRV.softmax(-1)).sum(0)
