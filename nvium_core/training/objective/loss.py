"""The training objective: L_mix + α L_balance during the router warm-up, and L_mix + β L_compute afterwards.

Another objective takes the same arguments, and returns an `ObjectiveResult`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium
from nvium_core.training.data.windows import Batch
from nvium_core.training.objective.cross_entropy import head_nll


@dataclass(frozen=True)
class Phase:
    """The current step, the share of steps done, and the weights α of L_balance and β of L_compute.

    α and β are 0-dimensional tensors, so that a compiled objective is not recompiled when they change.
    """

    step: int
    progress: float
    alpha: Tensor
    beta: Tensor


class ObjectiveResult(NamedTuple):
    """The mean loss over a batch's counted targets, and detached metrics, with the mean −log π_mix as `mix_loss`."""

    loss: Tensor
    metrics: dict[str, Tensor]


def counted_mean(value_BT: Tensor, batch: Batch) -> Tensor:
    """Average a value [B, T, …] over the counted targets. The result keeps the dimensions after T."""
    counted_BT = batch.counted.to(value_BT.dtype)
    weights = counted_BT.view(*counted_BT.shape, *(1 for _ in value_BT.shape[2:]))
    return (value_BT * weights).sum((0, 1)) / counted_BT.sum().clamp_min(1)


@dataclass(frozen=True)
class TokenLosses:
    """For each target: log w [B, T, E, 2], log p [B, T, E], and −log π_k of the target [B, T, E]."""

    log_w: Tensor
    log_p: Tensor
    exit_nll: Tensor


def token_losses(model: Nvium, batch: Batch) -> TokenLosses:
    """Run the model. Unlike the model's `forward`, this does not compute the whole distribution π_mix."""
    states = model.hidden_states(batch.inputs, batch.positions, batch.attention())
    log_w, outputs = model.exit_outputs(states)
    head = model.lm_head
    nll = [head_nll(head.scale * o_BTD, head.weight, batch.targets) for o_BTD in outputs]
    return TokenLosses(log_w, mixture.log_exit_probs(log_w), torch.stack(nll, dim=-1))


def nvium_objective(model: Nvium, batch: Batch, phase: Phase) -> ObjectiveResult:
    """Compute L_mix + α L_balance + β L_compute (paper, section on training)."""
    tokens = token_losses(model, batch)
    mix = counted_mean(mixture.mixture_nll(tokens.log_p, tokens.exit_nll), batch)
    compute = counted_mean(mixture.mean_depth(tokens.log_p, model.config.exit_layers or []), batch)
    balance = counted_mean(mixture.balance_penalty(tokens.log_w), batch)
    metrics = {
        "exit_probs": counted_mean(tokens.log_p.detach().exp(), batch),
        "exit_losses": counted_mean(tokens.exit_nll.detach(), batch),
        "mix_loss": mix.detach(),
        "mean_depth": compute.detach(),
        "balance_loss": balance.detach(),
    }
    return ObjectiveResult(mix + phase.alpha * balance + phase.beta * compute, metrics)
