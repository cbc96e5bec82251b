"""The training objective of one batch: L_mix, plus α L_balance while routers warm up, plus β L_compute afterwards."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nvium_core.model import mixture
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.cross_entropy import head_nll
from nvium_core.training.data import Batch


class Losses(NamedTuple):
    """Means over a batch: L_mix, L_compute (also the mean depth l/L), L_balance, and the exits' mean p_k [E]."""

    mix: Tensor
    compute: Tensor
    balance: Tensor
    exit_probs: Tensor

    def detached(self, share: float) -> "Losses":
        """The same without their graph, times a batch's share of a larger mean."""
        return Losses(*(share * value.detach() for value in self))


@dataclass(frozen=True)
class TokenLosses:
    """Per target token: log w [B, T, E, 2], log p [B, T, E], and −log π_k of the target [B, T, E]."""

    log_w: Tensor
    log_p: Tensor
    exit_nll: Tensor


def token_losses(model: NviumForCausalLM, batch: Batch) -> TokenLosses:
    """What the losses are made of. Unlike the model's forward, never builds log π_mix over the vocabulary."""
    states = model.hidden_states(batch.inputs, batch.positions, causal_attention(batch.mask()))
    log_w, outputs = model.exit_outputs(states)
    nll = [head_nll(o_BTD, model.lm_head.weight, batch.targets) for o_BTD in outputs]
    return TokenLosses(log_w, mixture.log_exit_probs(log_w), torch.stack(nll, dim=-1))


def batch_losses(model: NviumForCausalLM, batch: Batch) -> Losses:
    """The losses of a packed batch."""
    tokens = token_losses(model, batch)
    return Losses(
        mix=mixture.mixture_nll(tokens.log_p, tokens.exit_nll).mean(),
        compute=mixture.mean_depth(tokens.log_p, model.config.exit_layers or []).mean(),
        balance=mixture.balance_penalty(tokens.log_w).mean(),
        exit_probs=tokens.log_p.detach().exp().mean((0, 1)),
    )


def objective(losses: Losses, alpha: float, beta: float) -> Tensor:
    """L_mix + α L_balance + β L_compute (paper, section on training)."""
    return losses.mix + alpha * losses.balance + beta * losses.compute
