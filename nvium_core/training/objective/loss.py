"""The training objective of one batch: L_mix, plus α L_balance while routers warm up, plus β L_compute afterwards."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nvium_core.model import mixture
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.windows import Batch
from nvium_core.training.objective.cross_entropy import head_nll
from nvium_core.training.objective.objective import ObjectiveResult, Phase, counted_mean


class Losses(NamedTuple):
    """Means over a batch's counted targets: L_mix, L_compute (also the mean depth l/L), L_balance, mean p_k [E]."""

    mix: Tensor
    compute: Tensor
    balance: Tensor
    exit_probs: Tensor


@dataclass(frozen=True)
class TokenLosses:
    """Per target token: log w [B, T, E, 2], log p [B, T, E], and −log π_k of the target [B, T, E]."""

    log_w: Tensor
    log_p: Tensor
    exit_nll: Tensor


def token_losses(model: Nvium, batch: Batch) -> TokenLosses:
    """Unlike the model's forward, never builds log π_mix over the vocabulary."""
    states = model.hidden_states(batch.inputs, batch.positions, causal_attention(batch.mask()))
    log_w, outputs = model.exit_outputs(states)
    nll = [head_nll(o_BTD, model.lm_head.weight, batch.targets) for o_BTD in outputs]
    return TokenLosses(log_w, mixture.log_exit_probs(log_w), torch.stack(nll, dim=-1))


def batch_losses(model: Nvium, batch: Batch) -> Losses:
    tokens = token_losses(model, batch)
    return Losses(
        mix=counted_mean(mixture.mixture_nll(tokens.log_p, tokens.exit_nll), batch),
        compute=counted_mean(mixture.mean_depth(tokens.log_p, model.config.exit_layers or []), batch),
        balance=counted_mean(mixture.balance_penalty(tokens.log_w), batch),
        exit_probs=counted_mean(tokens.log_p.detach().exp(), batch),
    )


def nvium_objective(model: Nvium, batch: Batch, phase: Phase) -> ObjectiveResult:
    """L_mix + α L_balance + β L_compute (paper, section on training)."""
    losses = batch_losses(model, batch)
    figures = {"mix_loss": losses.mix, "mean_depth": losses.compute, "balance_loss": losses.balance}
    return ObjectiveResult(
        losses.mix + phase.alpha * losses.balance + phase.beta * losses.compute,
        {"exit_probs": losses.exit_probs, **{name: value.detach() for name, value in figures.items()}},
    )
