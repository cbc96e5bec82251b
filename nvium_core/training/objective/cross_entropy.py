"""−log softmax of a linear head at the targets, in chunks of rows if there are many logits.

The forward pass computes the logits of a chunk of rows at a time and discards them. The backward pass computes them
again. This saves memory. On a GPU, chunks are used only if memory is short. PyTorch's chunked
`linear_cross_entropy` is unsuitable: it computes gradients in the forward pass, before the weights of the exits in the
mixture are known.

Shapes: R rows, C rows of a chunk, D width, V vocabulary, X any.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nvium_core.model.nvium import token_nll

CHUNK_ROWS = 512
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
