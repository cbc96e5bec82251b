"""KL(π_N ‖ π_k) over the last exit's most likely tokens, with all other tokens as one class.

Let p be the last exit's distribution and q the early exit's. Let p_rest and q_rest be the probabilities that p and q
give to all tokens except p's top tokens, and r = 1 − p_rest / q_rest. With respect to the logits, the gradient of the
KL is q − p at a top token and q r elsewhere. The code computes q r for all tokens and adds a correction at the top
tokens. The gradient of −log π_k(target) is q − 1 at the target and q elsewhere. Both gradients need the product of q
and the head. The forward pass computes this product once per chunk of rows, and keeps no logits.

Shapes: R rows, C rows of a chunk, K top tokens, D width, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK_ROWS = 128
TOP = 32
LEAST = 1e-6  # lower bound of probabilities, so that their logarithms are finite


class Teacher(NamedTuple):
    """The last exit's top tokens for each row, their probabilities, and −log π_N of the target."""

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
    """Return each row's KL [R] and −log π_k of its target [R]."""
    losses: tuple[Tensor, Tensor] = HeadKl.apply(output_RD, head_VD, teacher.top_RK, teacher.probs_RK, target_R)
    return losses


class HeadKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output_RD: Tensor, head_VD: Tensor, top_RK: Tensor, probs_RK: Tensor, target_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunks = zip(*(x.split(CHUNK_ROWS) for x in (output_RD, top_RK, probs_RK, target_R)), strict=True)
        results = [_chunk_losses(head_VD, *chunk) for chunk in chunks]
        kl_R, nll_R, kl_gradient_RD, nll_gradient_RD = map(torch.cat, zip(*results, strict=True))
        ctx.save_for_backward(kl_gradient_RD, nll_gradient_RD)
        return kl_R, nll_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, kl_R: Tensor, nll_R: Tensor) -> tuple[Tensor, None, None, None, None]:
        kl_gradient_RD, nll_gradient_RD = ctx.saved_tensors
        return kl_gradient_RD * kl_R[:, None] + nll_gradient_RD * nll_R[:, None], None, None, None, None


def _chunk_losses(
    head_VD: Tensor, output_CD: Tensor, top_CK: Tensor, p_CK: Tensor, target_C: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return KL [C], −log π_k of the target [C], and the gradients of both with respect to the outputs [C, D]."""
    logits_CV = F.linear(output_CD.to(head_VD.dtype), head_VD).float()
    top_logits_CK, target_logit_C1 = logits_CV.gather(1, top_CK), logits_CV.gather(1, target_C[:, None])
    max_C1 = logits_CV.amax(-1, keepdim=True)
    scaled_q_CV = logits_CV.sub_(max_C1).exp_()
    scale_C1 = scaled_q_CV.sum(-1, keepdim=True)
    log_sum_C1 = max_C1 + scale_C1.log()
    log_q_CK = top_logits_CK - log_sum_C1
    q_CK = log_q_CK.exp()
    p_rest_C1, q_rest_C1 = ((1 - x.sum(1, keepdim=True)).clamp_min(LEAST) for x in (p_CK, q_CK))
    kl_CK = p_CK * (p_CK.clamp_min(LEAST).log() - log_q_CK)
    kl_C = kl_CK.sum(1) + (p_rest_C1 * (p_rest_C1 / q_rest_C1).log()).squeeze(1)
    r_C1 = 1 - p_rest_C1 / q_rest_C1
    mean_CD = (scaled_q_CV.to(head_VD.dtype) @ head_VD).float() / scale_C1
    correction_C1K = (q_CK - p_CK - q_CK * r_C1)[:, None].to(head_VD.dtype)
    kl_gradient_CD = mean_CD * r_C1 + (correction_C1K @ head_VD[top_CK]).squeeze(1)
    nll_gradient_CD = mean_CD - head_VD[target_C]
    nll_C = (log_sum_C1 - target_logit_C1).squeeze(1)
    return kl_C, nll_C, kl_gradient_CD.to(output_CD.dtype), nll_gradient_CD.to(output_CD.dtype)
