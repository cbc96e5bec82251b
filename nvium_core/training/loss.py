"""The training objective of one batch: L_mix, plus α L_balance while routers warm up, plus β L_compute afterwards."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.data import Batch


@dataclass(frozen=True)
class Losses:
    """Means over a batch: L_mix, L_compute (also the mean depth l/L), L_balance, and the exits' mean p_k [E]."""

    mix: Tensor
    compute: Tensor
    balance: Tensor
    exit_probs: Tensor


def batch_losses(model: NviumForCausalLM, batch: Batch) -> Losses:
    """The losses of a packed batch. Unlike the model's forward, never builds log π_mix over the vocabulary."""
    attend = causal_attention(batch.mask())
    states = model.hidden_states(batch.inputs, batch.positions, attend)
    log_w, outputs = model.exit_outputs(states)
    log_p = mixture.log_exit_probs(log_w)
    targets = batch.targets.flatten()
    nll_XE = torch.stack([F.cross_entropy(model.lm_head(o).flatten(0, 1).float(), targets, reduction="none") for o in outputs], -1)
    return Losses(
        mix=mixture.mixture_nll(log_p.flatten(0, 1), nll_XE).mean(),
        compute=mixture.mean_depth(log_p, model.config.exit_layers or []).mean(),
        balance=mixture.balance_penalty(log_w).mean(),
        exit_probs=log_p.detach().exp().mean((0, 1)),
    )


def objective(losses: Losses, alpha: float, beta: float) -> Tensor:
    """L_mix + α L_balance + β L_compute (paper, section on training)."""
    return losses.mix + alpha * losses.balance + beta * losses.compute
