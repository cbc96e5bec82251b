"""What this machine can do, and what a token asks of it: bytes read and operations, per second and per token.

Measured on the device and with the threads that the model runs with.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import cast

import torch
from torch import nn

from nvium_core.bench.harness import Figures
from nvium_core.engine.schedule.exit_frequencies import exit_probabilities, reach_probabilities
from nvium_core.model.exits import Exit
from nvium_core.model.flops import flops_per_token, spoken_flops
from nvium_core.model.nvium import NviumForCausalLM

BUFFER_BYTES = 2**30
"""Read at a stretch: more than caches hold."""

MATRIX_WIDTH = 2048
TRIES = 5


def machine(like: torch.Tensor, buffer_bytes: int = BUFFER_BYTES, matrix_width: int = MATRIX_WIDTH) -> Figures:
    """Bytes read and operations done per second, each at its best of a few tries; `like` gives device and precision."""
    return {
        "bytes_per_second": read_rate(like, buffer_bytes),
        "flops_per_second": arithmetic_rate(like, matrix_width),
    }


def read_rate(like: torch.Tensor, num_bytes: int) -> float:
    """The faster of a sum over float32 numbers and a product with a vector in the model's precision."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=like.device)
    width = 4096 if num_bytes >= 2**24 else 64
    matrix = buffer.view(like.dtype)[: num_bytes // like.itemsize // width * width].view(-1, width)
    vector = torch.zeros(width, dtype=like.dtype, device=like.device)
    fastest = min(least_seconds(buffer.sum), least_seconds(lambda: matrix @ vector))
    return num_bytes / fastest


def arithmetic_rate(like: torch.Tensor, width: int) -> float:
    """Of a product of two square matrices in the model's precision."""
    matrix = torch.full((width, width), 1 / width, dtype=like.dtype, device=like.device)
    return 2 * width**3 / least_seconds(lambda: matrix @ matrix)


def least_seconds(work: Callable[[], object]) -> float:
    """Of a few tries, after one that warms up."""
    return min([seconds(work) for _ in range(TRIES + 1)][1:])


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def demands(model: NviumForCausalLM, twin: NviumForCausalLM, routing: Items[float], num_positions: int) -> Figures:
    """Of one sequence, by way of decoding: bytes of weights a token reads, and its operations with so many positions
    before it."""
    dense_flops = flops_per_token(twin.config, num_positions).total
    flops = spoken_flops(model.config, num_positions, routing).total
    return {
        "optimal": {"bytes": weight_bytes(model, routing, skips=True), "flops": flops},
        "synchronous": {"bytes": weight_bytes(model, routing, skips=False), "flops": flops},
        "dense twin": {"bytes": weight_bytes(twin, [1.0], skips=False), "flops": dense_flops},
    }


def weight_bytes(model: NviumForCausalLM, routing: Items[float], *, skips: bool) -> float:
    """Σ_k P(depth ≥ k)·(block k and its junction) + Σ_k p_k·(adapter k) + head, as stored; if nothing is skipped each
    block is read once for every token, and junctions as before."""
    shares = [share / sum(routing) for share in routing]
    reached = reach_probabilities(exit_probabilities(shares))
    total = float(num_bytes(model.lm_head))
    for block, exit_, p, reach in zip(model.config.blocks, model.exits, shares, reached, strict=True):
        layers = sum(num_bytes(model.model.layers[index]) for index in block)
        adapter = num_bytes(cast(Exit, exit_).adapter)
        total += (reach if skips else 1.0) * layers + reach * (num_bytes(exit_) - adapter) + p * adapter
    return total


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def beside(asked: Figures, rates: Figures, tokens_per_second: float) -> Figures:
    """What one way asks per token, the least time the machine needs for it, and how near to that it comes."""
    by_bandwidth, by_arithmetic = (asked[name] / rates[f"{name}_per_second"] for name in ("bytes", "flops"))
    return {
        **asked,
        "least_ms_by_bandwidth": 1000 * by_bandwidth,
        "least_ms_by_arithmetic": 1000 * by_arithmetic,
        "share_of_bandwidth": by_bandwidth * tokens_per_second,
        "share_of_arithmetic": by_arithmetic * tokens_per_second,
    }
