"""The mixture so far of sequences that need it explicitly: m_k = Σ_{j≤k} p_j g(π_j).

Exits leave their head input here as they are passed. The head is evaluated once somebody wants the sum, for all exits
since the last time together: reading its weights is what it costs. All by seat; a Step at block k writes what belongs
to k and reads what came before, so it can be run again.

Shapes: E exits, J consecutive ones of them, S seats, R some of them, D width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nvium_core.model.nvium import NviumForCausalLM


class PartialMixtures:
    def __init__(self, model: NviumForCausalLM, *, max_sequences: int) -> None:
        config, weight = model.config, model.lm_head.weight
        precise = partial(torch.zeros, dtype=torch.float64, device=weight.device)
        self._head = model.lm_head
        self._output_ESD = weight.new_zeros(config.num_exits, max_sequences, config.hidden_size)
        self._exit_prob_ES = precise(config.num_exits, max_sequences)
        self._sum_2SV = precise(2, max_sequences, config.vocab_size)
        """Blocks take turns between the two, so that no Step overwrites what it reads."""

    def keep(self, block: int, seats_R: Tensor, o_RD: Tensor, exit_prob_R: Tensor) -> None:
        """Take in what an exit says: o_k, which the head is applied to, and p_k."""
        self._output_ESD[block, seats_R] = o_RD
        self._exit_prob_ES[block, seats_R] = exit_prob_R

    def add(self, exits: range, seats_R: Tensor, g: Callable[[Tensor], None] | None = None) -> Tensor:
        """m_k [R, V] in float64, k the last of `exits`: the shares of these exits and of those added before.

        `exits` starts at 0 or where the last call for these seats ended. g changes logits [J, R, V] in place.
        """
        logits_JRV = self._head(self._output_ESD[exits.start : exits.stop, seats_R]).double()
        if g is not None:
            g(logits_JRV)
        exit_prob_JR1 = self._exit_prob_ES[exits.start : exits.stop, seats_R, None]
        sum_RV = (exit_prob_JR1 * logits_JRV.softmax(-1)).sum(0)
        if exits.start:
            sum_RV += self._sum_2SV[(exits.start - 1) % 2, seats_R]
        self._sum_2SV[(exits.stop - 1) % 2, seats_R] = sum_RV
        return sum_RV
