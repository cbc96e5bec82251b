"""The training objective: L_mix + α L_balance during the router warm-up, and L_mix + β L_compute afterwards.

Another objective takes the same arguments, and returns an `ObjectiveResult`.

`head_nll` computes −log softmax of a linear head at the targets in parts, if there are many logits. The forward pass
computes a part of the logits at a time and discards them. The backward pass computes them again. This saves memory. On
a CPU, a part is a block of words, which stays in the cache. On a GPU, a part is a chunk of rows, and there are several
only if memory is short. PyTorch's chunked `linear_cross_entropy` is unsuitable: it computes gradients in the forward
pass, before the weights of the exits in the mixture are known.

Shapes: B windows, T tokens, E exits, R rows, C rows of a chunk, D width, V vocabulary, W words of a block, S two more
than D, X any.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium, token_nll
from nvium_core.training.data.windows import Batch

CHUNK_ROWS = 512
BLOCK_WORDS = 512
MAX_EXPONENT = 64  # its exponential is finite in float32, also summed over all words
MAX_LOGITS = 2**26  # if there are more logits, they are computed in parts
BYTES_PER_LOGIT = 64  # of a GPU's free memory: eight exits' logits in bfloat16 and float32, with some to spare
CHUNKS = 8  # into which a GPU's logits are split at least


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


def token_losses(model: Nvium, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each target, log w [B, T, E, 2], log p [B, T, E] and −log π_k of the target [B, T, E].

    Unlike the model's `forward`, this does not compute the whole distribution π_mix.
    """
    states = model.hidden_states(batch.inputs, batch.positions, batch.attention())
    log_w, outputs = model.exit_outputs(states)
    head = model.lm_head
    nll = [head_nll(head.scale * o_BTD, head.weight, batch.targets) for o_BTD in outputs]
    return log_w, mixture.log_exit_probs(log_w), torch.stack(nll, dim=-1)


def nvium_objective(model: Nvium, batch: Batch, phase: Phase) -> ObjectiveResult:
    """Compute L_mix + α L_balance + β L_compute (paper, section on training)."""
    log_w, log_p, exit_nll = token_losses(model, batch)
    mix = counted_mean(mixture.mixture_nll(log_p, exit_nll), batch)
    compute = counted_mean(mixture.mean_depth(log_p, model.config.exit_layers or []), batch)
    balance = counted_mean(mixture.balance_penalty(log_w), batch)
    metrics = {
        "exit_probs": counted_mean(log_p.detach().exp(), batch),
        "exit_losses": counted_mean(exit_nll.detach(), batch),
        "mix_loss": mix.detach(),
        "mean_depth": compute.detach(),
        "balance_loss": balance.detach(),
    }
    return ObjectiveResult(mix + phase.alpha * balance + phase.beta * compute, metrics)


def head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    """Return −log softmax(output · headᵀ) at the targets, [X], in float32 or better."""
    device_type = head_VD.device.type
    if target_X.numel() * len(head_VD) <= max_logits(device_type):
        return token_nll(F.linear(output_XD, head_VD), target_X)
    in_parts = block_head_nll if device_type == "cpu" else chunked_head_nll
    return in_parts(output_XD, head_VD, target_X)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # PyTorch has no types for it
def max_logits(device_type: str) -> int:
    return MAX_LOGITS if device_type == "cpu" else max(MAX_LOGITS, free_bytes() // BYTES_PER_LOGIT)


@cache
def free_bytes() -> int:
    """Return the free memory of the current GPU at the first call, so that all steps have the same chunks."""
    return int(torch.cuda.mem_get_info()[0])


def chunk_rows(head_VD: Tensor) -> int:
    return max(CHUNK_ROWS, max_logits(head_VD.device.type) // len(head_VD) // CHUNKS)


def chunked_head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    """Compute `head_nll` in chunks of rows. Only GPUs need it; on a CPU it runs in tests."""
    parts = (x.split(chunk_rows(head_VD)) for x in (output_XD.flatten(0, -2), target_X.flatten()))
    nll = [
        checkpoint(chunk_nll, output_CD, head_VD, target_C, use_reentrant=False, preserve_rng_state=False)
        for output_CD, target_C in zip(*parts, strict=True)
    ]
    return torch.cat(nll).view(target_X.shape)


def chunk_nll(output_CD: Tensor, head_VD: Tensor, target_C: Tensor) -> Tensor:
    device_type = output_CD.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast would share one cast of the head, and add the chunks' gradients in bfloat16.
        head_VD = head_VD.to(torch.get_autocast_dtype(device_type))
    return token_nll(F.linear(output_CD, head_VD), target_C)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch has no types for it
def block_head_nll(output_XD: Tensor, head_VD: Tensor, target_X: Tensor) -> Tensor:
    """Compute `head_nll` in blocks of words. The compiler would take minutes for the many blocks."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else output_XD.dtype
    nll_R: Tensor = BlockNll.apply(output_XD.flatten(0, -2).to(dtype), head_VD.to(dtype), target_X.flatten())
    return nll_R.view(target_X.shape)


class BlockNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output_RD: Tensor, head_VD: Tensor, word_R: Tensor) -> Tensor:
        precise = torch.promote_types(output_RD.dtype, torch.float32)
        target_R = (output_RD.to(precise) * head_VD[word_R]).sum(1)
        blocks, shift_R = head_VD.split(BLOCK_WORDS), target_R
        if (output_RD.norm(dim=1) * head_VD.norm(dim=1).max() - target_R).max() > MAX_EXPONENT:
            max_R = torch.stack([F.linear(output_RD, block_WD).amax(1) for block_WD in blocks]).amax(0).to(precise)
            shift_R = target_R.where(max_R - target_R <= MAX_EXPONENT, max_R)
        shifted_RS, head_VS = shifted(output_RD, head_VD, shift_R)
        sum_R = torch.zeros_like(target_R)
        for block_WS in head_VS.split(BLOCK_WORDS):
            sum_R += F.linear(shifted_RS, block_WS).exp_().sum(1, dtype=precise)
        log_sum_R = shift_R + sum_R.log()
        ctx.save_for_backward(output_RD, head_VD, word_R, log_sum_R)
        return sum_R.log() + (shift_R - target_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor, Tensor, None]:
        output_RD, head_VD, word_R, log_sum_R = ctx.saved_tensors
        dtype, gradient_R1 = output_RD.dtype, gradient_R[:, None]
        shifted_RS, head_VS = shifted(output_RD, head_VD, log_sum_R)
        weighted_RD = (output_RD * gradient_R1).to(dtype)
        mean_RD, gradients = torch.zeros_like(output_RD, dtype=gradient_R.dtype), []
        for block_WD, block_WS in zip(head_VD.split(BLOCK_WORDS), head_VS.split(BLOCK_WORDS), strict=True):
            probs_RW = F.linear(shifted_RS, block_WS).exp_()
            mean_RD += probs_RW @ block_WD
            gradients.append(probs_RW.T @ weighted_RD)
        gradient_VD = torch.cat(gradients).to(gradient_R.dtype)
        gradient_VD.index_add_(0, word_R, -weighted_RD.to(gradient_R.dtype))
        return (mean_RD - head_VD[word_R]) * gradient_R1, gradient_VD, None


def shifted(output_RD: Tensor, head_VD: Tensor, shift_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of the logits minus the shift. Two more columns subtract it before the product is rounded."""
    high_R = shift_R.to(output_RD.dtype)
    low_R = (shift_R - high_R).to(output_RD.dtype)
    columns = torch.stack([-high_R, -low_R], 1)
    return torch.cat([output_RD, columns], 1), torch.cat([head_VD, head_VD.new_ones(len(head_VD), 2)], 1)
