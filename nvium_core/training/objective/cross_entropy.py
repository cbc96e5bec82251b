"""−log softmax of a linear head at the targets, in chunks of rows if there are many logits.

The forward pass computes the logits of a chunk of rows at a time and discards them. The backward pass computes them
again. This saves memory and takes little longer. On a GPU, chunks are used only if memory is short. PyTorch's chunked
`linear_cross_entropy` is unsuitable: it computes gradients in the forward pass, before the weights of the exits in the
mixture are known.

Shapes: R rows, C rows of a chunk, D width, V vocabulary, X any.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nvium_core.model.nvium import token_nll

CHUNK_ROWS = 1024
MAX_LOGITS = 2**26  # if there are more logits, they are computed in chunks
BYTES_PER_LOGIT = 64  # of a GPU's free memory: eight exits' logits in bfloat16 and float32, with some to spare
CHUNKS = 8  # into which a GPU's logits are split at least


def head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    """Return −log softmax(output · headᵀ) at the targets, [X], in float32 or better."""
    if target_X.numel() < min_chunked_rows(len(head_VD), head_VD.device.type):
        return token_nll(F.linear(output_XD, head_VD), target_X)
    return chunked_head_nll(output_XD, head_VD, target_X)


def min_chunked_rows(vocab_size: int, device_type: str = "cpu") -> int:
    return max_logits(device_type) // vocab_size + 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch has no types for it
def max_logits(device_type: str) -> int:
    """Return how many logits of an exit may be in memory at once."""
    return MAX_LOGITS if device_type == "cpu" else max(MAX_LOGITS, free_bytes() // BYTES_PER_LOGIT)


@cache
def free_bytes() -> int:
    """Return the free memory of the current GPU at the first call, so that all steps have the same chunks."""
    return int(torch.cuda.mem_get_info()[0])


def chunk_rows(head_VD: Tensor) -> int:
    device_type = head_VD.device.type
    return CHUNK_ROWS if device_type == "cpu" else max(CHUNK_ROWS, max_logits(device_type) // len(head_VD) // CHUNKS)


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
        size = chunk_rows(head_VD)
        for output_CD, target_C in zip(output_RD.split(size), target_R.split(size), strict=True):
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
        parts = (x.split(chunk_rows(head_VD)) for x in rows)
        for output_CD, target_C, log_sum_C, gradient_C in zip(*parts, strict=True):
            excess_CV = precise_logits(output_CD, head_VD).sub_(log_sum_C[:, None]).exp_()
            excess_CV.scatter_add_(1, target_C[:, None], -torch.ones_like(log_sum_C)[:, None])
            scaled_CV = excess_CV.mul_(gradient_C[:, None]).to(head_VD.dtype)
            output_gradients.append(scaled_CV @ head_VD)
            head_gradient_VD += scaled_CV.T @ output_CD
        return torch.cat(output_gradients), head_gradient_VD.to(head_VD.dtype), None


def precise_logits(output_CD: Tensor, head_VD: Tensor) -> Tensor:
    logits_CV = output_CD @ head_VD.T
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
