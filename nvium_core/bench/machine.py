"""What this machine can do: bytes read and operations per second.

Measured on the model's device with its threads, in a few seconds on any machine.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from nvium_core.bench.harness import Figures

BUFFER_BYTES = 2**30
"""Read in one pass: more than caches hold."""

ENOUGH_SECONDS = 0.02
"""Matrices are enlarged until a product takes this long."""

MIN_WIDTH, MAX_WIDTH = 128, 8192
TRIES = 5


def machine(like: torch.Tensor, buffer_bytes: int = BUFFER_BYTES, enough_seconds: float = ENOUGH_SECONDS) -> Figures:
    """Bytes read per second, and operations per second by precision; `like` has the device and precision."""
    return {
        "bytes_per_second": read_rate(like.device, buffer_bytes),
        "flops_per_second": {
            str(dtype).removeprefix("torch."): arithmetic_rate(dtype, like.device, enough_seconds)
            for dtype in precisions(like.dtype)
        },
    }


def precisions(dtype: torch.dtype) -> list[torch.dtype]:
    """Precisions that the engine may compute in: processors without 16-bit products widen 16-bit weights."""
    return [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes per second: the faster of a sum and a matrix-vector product over float32."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    width = 4096 if num_bytes >= 2**24 else 64
    matrix, vector = buffer[: len(buffer) // width * width].view(-1, width), torch.zeros(width, device=device)
    return num_bytes / min(least_seconds(buffer.sum), least_seconds(lambda: matrix @ vector))


def arithmetic_rate(dtype: torch.dtype, device: torch.device, enough_seconds: float) -> float:
    """Operations per second of a product of square matrices."""
    width = MIN_WIDTH
    while True:
        matrix = torch.full((width, width), 1 / width, dtype=dtype, device=device)
        taken = least_seconds(partial(torch.matmul, matrix, matrix))
        if taken >= enough_seconds or width == MAX_WIDTH:
            return 2 * width**3 / taken
        width *= 2


def least_seconds(work: Callable[[], object]) -> float:
    """The fastest of a few tries after a warm-up."""
    return min([seconds(work) for _ in range(TRIES + 1)][1:])


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
