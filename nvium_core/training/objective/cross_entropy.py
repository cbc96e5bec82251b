"""−log softmax of a linear head at the targets, in chunks of rows if there are many logits.

The forward pass computes the logits of `CHUNK_ROWS` rows at a time and discards them. The backward pass computes them
again. This saves memory and takes little longer. PyTorch's chunked `linear_cross_entropy` is unsuitable: it computes
gradients in the forward pass, before the weights of the exits in the mixture are known.

Shapes: R rows, C rows of a chunk, D width, V vocabulary, X any.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nvium_core.model.nvium import token_nll

CHUNK_ROWS = 1024
MAX_LOGITS = 2**26  # if there are more logits, they are computed in chunks


def head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    """Return −log softmax(output · headᵀ) at the targets, [X], in float32 or better."""
    if target_X.numel() < min_chunked_rows(len(head_VD)):
        return token_nll(F.linear(output_XD, head_VD), target_X)
    return chunked_head_nll(output_XD, head_VD, target_X)


def min_chunked_rows(vocab_size: int) -> int:
    return MAX_LOGITS // vocab_size + 1


def chunked_head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    """Compute `head_nll` in chunks, even if there are few logits."""
    if torch.is_autocast_enabled(output_XD.device.type):
        head_VD = head_VD.to(torch.get_autocast_dtype(output_XD.device.type))
    nll_R: Tensor = HeadNll.apply(output_XD.flatten(0, -2).to(head_VD.dtype), head_VD, target_X.flatten())
    return nll_R.view(target_X.shape)


class HeadNll(torch.autograd.Function):
    """Saves log Σ exp of each row's logits, from which the backward pass recomputes the probabilities."""

    @staticmethod
    def forward(ctx: Any, output_RD: Tensor, head_VD: Tensor, target_R: Tensor) -> Tensor:
        normalisers, picked = [], []
        for output_CD, target_C in zip(output_RD.split(CHUNK_ROWS), target_R.split(CHUNK_ROWS), strict=True):
            logits_CV = precise_logits(output_CD, head_VD)
            normalisers.append(logits_CV.logsumexp(-1))
            picked.append(logits_CV.gather(-1, target_C[:, None]).squeeze(-1))
        log_sum_R = torch.cat(normalisers)
        ctx.save_for_backward(output_RD, head_VD, target_R, log_sum_R)
        return log_sum_R - torch.cat(picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, Tensor, None]:
        output_RD, head_VD, target_R, log_sum_R = ctx.saved_tensors
        rows = (output_RD, target_R, log_sum_R, gradient_R)
        output_gradients, head_gradient_VD = [], torch.zeros_like(head_VD, dtype=log_sum_R.dtype)
        for output_CD, target_C, log_sum_C, gradient_C in zip(*(x.split(CHUNK_ROWS) for x in rows), strict=True):
            excess_CV = precise_logits(output_CD, head_VD).sub_(log_sum_C[:, None]).exp_()
            excess_CV.scatter_add_(1, target_C[:, None], -torch.ones_like(log_sum_C)[:, None])
            scaled_CV = excess_CV.mul_(gradient_C[:, None]).to(head_VD.dtype)
            output_gradients.append(scaled_CV @ head_VD)
            head_gradient_VD += scaled_CV.T @ output_CD
        return torch.cat(output_gradients), head_gradient_VD.to(head_VD.dtype), None


def precise_logits(output_CD: Tensor, head_VD: Tensor) -> Tensor:
    logits_CV = output_CD @ head_VD.T
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
