"""KL(π_N ‖ π_k) on the tokens that the last exit finds likeliest, and on all others as one.

With p the last exit's distribution, q the exit's, and `rest` what is beyond p's top tokens, the gradient by the logits
is q − p for a top token and q r with r = 1 − p_rest / q_rest for another. So the head is applied once, a few rows at a
time, and no logits are kept; the gradient is that of q r for all, and what top tokens differ by. The gradient of
−log π_k of the token that came, q less one there, takes the same product of q and the head.

Shapes: R rows, C rows at a time, K top tokens, D width, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK_ROWS = 128
TOP = 32
LEAST = 1e-6
"""Smallest mass outside the top tokens, so that its logarithm is finite."""


class Teacher(NamedTuple):
    """The last exit's top tokens of each row, their probabilities, and −log of that of the token that came."""

    top_RK: Tensor
    probs_RK: Tensor
    nll_R: Tensor


@torch.no_grad()
def teacher_of(output_RD: Tensor, head_VD: Tensor, target_R: Tensor) -> Teacher:
    parts = []
    for output_CD, target_C in zip(output_RD.split(CHUNK_ROWS), target_R.split(CHUNK_ROWS), strict=True):
        logits_CV = F.linear(output_CD.to(head_VD.dtype), head_VD).float()
        log_sum_C1 = logits_CV.logsumexp(-1, keepdim=True)
        top_logits_CK, top_CK = logits_CV.topk(min(TOP, len(head_VD) - 1), sorted=False)
        nll_C = (log_sum_C1 - logits_CV.gather(1, target_C[:, None])).squeeze(1)
        parts.append((top_CK, (top_logits_CK - log_sum_C1).exp(), nll_C))
    return Teacher(*map(torch.cat, zip(*parts, strict=True)))


def head_kl(output_RD: Tensor, head_VD: Tensor, teacher: Teacher, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """KL [R] of each row, and −log π_k of the token that came [R]."""
    found: tuple[Tensor, Tensor] = HeadKl.apply(output_RD, head_VD, teacher.top_RK, teacher.probs_RK, target_R)
    return found


class HeadKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output_RD: Tensor, head_VD: Tensor, top_RK: Tensor, probs_RK: Tensor, target_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, *said = (x.split(CHUNK_ROWS) for x in (output_RD, top_RK, probs_RK, target_R))
        found = [_of_chunk(head_VD, output_CD, *of_rows) for output_CD, *of_rows in zip(outputs, *said, strict=True)]
        kl_R, nll_R, by_kl_RD, by_nll_RD = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(by_kl_RD, by_nll_RD)
        return kl_R, nll_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_kl_R: Tensor, of_nll_R: Tensor) -> tuple[Tensor, None, None, None, None]:
        by_kl_RD, by_nll_RD = ctx.saved_tensors
        return by_kl_RD * of_kl_R[:, None] + by_nll_RD * of_nll_R[:, None], None, None, None, None


def _of_chunk(
    head_VD: Tensor, output_CD: Tensor, top_CK: Tensor, p_CK: Tensor, target_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL [C], −log of the target [C], and the gradient of each by the outputs [C, D]."""
    logits_CV = F.linear(output_CD.to(head_VD.dtype), head_VD).float()
    top_logits_CK, target_logit_C1 = logits_CV.gather(1, top_CK), logits_CV.gather(1, target_C[:, None])
    most_C1 = logits_CV.amax(-1, keepdim=True)
    scaled_q_CV = logits_CV.sub_(most_C1).exp_()
    scale_C1 = scaled_q_CV.sum(-1, keepdim=True)
    log_sum_C1 = most_C1 + scale_C1.log()
    log_q_CK = top_logits_CK - log_sum_C1
    q_CK = log_q_CK.exp()
    p_rest_C1, q_rest_C1 = ((1 - x.sum(1, keepdim=True)).clamp_min(LEAST) for x in (p_CK, q_CK))
    kl_CK = p_CK * (p_CK.clamp_min(LEAST).log() - log_q_CK)
    kl_C = kl_CK.sum(1) + (p_rest_C1 * (p_rest_C1 / q_rest_C1).log()).squeeze(1)
    r_C1 = 1 - p_rest_C1 / q_rest_C1
    mean_CD = (scaled_q_CV.to(head_VD.dtype) @ head_VD).float() / scale_C1
    differs_C1K = (q_CK - p_CK - q_CK * r_C1)[:, None].to(head_VD.dtype)
    by_kl_CD = mean_CD * r_C1 + (differs_C1K @ head_VD[top_CK]).squeeze(1)
    by_nll_CD = mean_CD - head_VD[target_C]
    nll_C = (log_sum_C1 - target_logit_C1).squeeze(1)
    return kl_C, nll_C, by_kl_CD.to(output_CD.dtype), by_nll_CD.to(output_CD.dtype)
