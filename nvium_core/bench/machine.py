"""Measures memory bandwidth and FLOP/s of the model's device in a few seconds, with PyTorch's number of threads."""

from collections.abc import Callable
from functools import partial
from timeit import repeat

import torch
from torch.utils.benchmark import timer

from nvium_core.bench.figures import Figures
from nvium_core.engine.device.arena import zeros

BUFFER_BYTES = 2**30  # size of the buffer that is read; larger than the CPU's caches
ENOUGH_SECONDS = 0.02  # the matrices grow until one product takes this long

MIN_WIDTH, MAX_WIDTH = 128, 8192
TRIES = 5


def machine(like: torch.Tensor, buffer_bytes: int = BUFFER_BYTES, enough_seconds: float = ENOUGH_SECONDS) -> Figures:
    """Measure bytes per second, and FLOP/s by precision. `like`: any tensor with the model's device and precision."""
    return {
        "bytes_per_second": read_rate(like.device, buffer_bytes),
        "flops_per_second": {
            str(dtype).removeprefix("torch."): arithmetic_rate(dtype, like.device, enough_seconds)
            for dtype in precisions(like.dtype)
        },
    }


def precisions(dtype: torch.dtype) -> list[torch.dtype]:
    """Return the precisions in which the engine may compute. Some CPUs compute with 16-bit weights in float32."""
    return [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Measure the bytes read per second by a sum and by a matrix-vector product, in float32. Return the higher rate."""
    buffer = zeros(num_bytes).view(torch.float32).fill_(1).to(device)  # in huge pages, as packed weights
    width = 4096 if num_bytes >= 2**24 else 64
    matrix, vector = buffer[: len(buffer) // width * width].view(-1, width), torch.zeros(width, device=device)
    return num_bytes / min(least_seconds(buffer.sum), least_seconds(lambda: matrix @ vector))


def arithmetic_rate(dtype: torch.dtype, device: torch.device, enough_seconds: float) -> float:
    """Measure FLOP/s of a product of square matrices."""
    width = MIN_WIDTH
    while True:
        matrix = torch.full((width, width), 1 / width, dtype=dtype, device=device)
        taken = least_seconds(partial(torch.matmul, matrix, matrix))
        if taken >= enough_seconds or width == MAX_WIDTH:
            return 2 * width**3 / taken
        width *= 2


def least_seconds(work: Callable[[], object]) -> float:
    """Return the time of the fastest of `TRIES` runs, after a warm-up run. PyTorch's timer waits for a GPU."""
    work()
    return min(repeat(work, timer=timer, repeat=TRIES, number=1))
