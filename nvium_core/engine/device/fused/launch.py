"""Launches Triton kernels."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel. On the meta device, do nothing."""
    if not any(isinstance(each, Tensor) and each.is_meta for each in arguments):
        kernel[grid](*arguments, **constants)


def wide_of(tensor: Tensor) -> Any:
    """Return Triton's type of sums of the tensor's elements."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32
