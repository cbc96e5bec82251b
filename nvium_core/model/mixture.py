"""The mathematics of the mixture: p_k, π_mix and the three losses, in log space.

log w is −inf if a router never continues or never exits. All functions accept −inf and do not return NaN.

Shapes: X any row dimensions, E exits, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvium_core.model.exits import CONTINUE, EXIT


def log_exit_probs(log_w_XE2: Tensor) -> Tensor:
    """Return log p_k = log w_k + Σ_{j<k} log (1 − w_j), [X, E]."""
    log_continue_XE = log_w_XE2[..., CONTINUE]
    log_reached_XE = torch.zeros_like(log_continue_XE)
    log_reached_XE[..., 1:] = log_continue_XE[..., :-1].cumsum(-1)
    return log_w_XE2[..., EXIT] + log_reached_XE


def log_remaining(log_w_XE2: Tensor) -> Tensor:
    """Return log Π_{j≤k} (1 − w_j), the probability of all later exits, [X, E], in float64."""
    return log_w_XE2[..., CONTINUE].double().cumsum(-1)


def threshold_exit(log_remaining_XE: Tensor, threshold: Tensor | float) -> Tensor:
    """Return the first exit (from 0) whose cumulative probability is at least the threshold, else the last, [X]."""
    reached_XE = -log_remaining_XE.expm1() >= torch.as_tensor(threshold, device=log_remaining_XE.device)[..., None]
    reached_XE[..., -1] = True
    return reached_XE.int().argmax(-1)


def log_mixture(log_p_XE: Tensor, exit_logits_XEV: Tensor) -> Tensor:
    """Return log π_mix = log Σ_k p_k π_k, [X, V], normalised."""
    precise = exit_logits_XEV.to(log_p_XE.dtype)
    return torch.logsumexp(log_p_XE.unsqueeze(-1) + precise.log_softmax(-1), dim=-2)


def mixture_nll(log_p_XE: Tensor, exit_nll_XE: Tensor) -> Tensor:
    """Return −log π_mix of the target token, [X], given −log π_k of that token at each exit."""
    return -torch.logsumexp(log_p_XE - exit_nll_XE, dim=-1)


def mean_depth(log_p_XE: Tensor, exit_layers: Sequence[int]) -> Tensor:
    """Return Σ_k p_k l_k / L of each row, [X]. The mean is L_compute."""
    depths_E = torch.tensor(exit_layers, dtype=log_p_XE.dtype, device=log_p_XE.device) / exit_layers[-1]
    return (log_p_XE.exp() * depths_E).sum(-1)  # not a matmul, which autocast would compute in bfloat16


def balance_penalty(log_w_XE2: Tensor) -> Tensor:
    """Return Σ_{k<N} (w_k − 1/(N−k+1))² of each row, [X]. The mean is L_balance. It is 0 for equal exit shares."""
    num_exits = log_w_XE2.shape[-2]
    w_XK = log_w_XE2[..., :-1, EXIT].exp()
    balanced_K = 1.0 / torch.arange(num_exits, 1, -1, dtype=w_XK.dtype, device=w_XK.device)
    return (w_XK - balanced_K).square().sum(-1)
