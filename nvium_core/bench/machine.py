"""What this machine can do, and what a token needs: bytes read and operations, per second and per token.

Measured on the model's device with its threads, in a few seconds on any machine.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from nvium_core.bench.harness import Figures
from nvium_core.engine.schedule.exit_frequencies import exit_probabilities, reach_probabilities
from nvium_core.model.exits import Exit
from nvium_core.model.flops import flops_per_token, spoken_flops
from nvium_core.model.nvium import NviumForCausalLM

BUFFER_BYTES = 2**30
"""Read in one pass: more than caches hold."""

ENOUGH_SECONDS = 0.02
"""Duration of a matrix product beyond which matrices are not enlarged."""

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
    """Those the engine may multiply in: 16-bit weights are widened where a processor has no 16-bit products."""
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


def demands(
    model: NviumForCausalLM,
    twin: NviumForCausalLM,
    routing: Sequence[float],
    num_positions: int,
    num_sequences: int = 1,
) -> Figures:
    """Bytes that a token of so many sequences reads, and its operations after `num_positions` positions: its keys and
    values, and its share of the weights. Which of them a batch is spared by leaving early is not known here."""
    dense_flops = flops_per_token(twin.config, num_positions).total
    flops = spoken_flops(model.config, num_positions, routing).total
    own, of_twin = (num_positions * key_value_bytes(each) for each in (model, twin))
    passing = {
        "synchronous": {"bytes": own + weight_bytes(model, routing, skips=False) / num_sequences, "flops": flops},
        "dense twin": {"bytes": of_twin + weight_bytes(twin, [1.0], skips=False) / num_sequences, "flops": dense_flops},
    }
    if num_sequences > 1:
        return passing
    return {"optimal": {"bytes": own + weight_bytes(model, routing, skips=True), "flops": flops}} | passing


def key_value_bytes(model: NviumForCausalLM) -> int:
    """Of a position, in all layers."""
    config = model.config
    heads = config.num_key_value_heads or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * (config.head_dim or 0) * model.dtype.itemsize


def weight_bytes(model: NviumForCausalLM, routing: Sequence[float], *, skips: bool) -> float:
    """Σ_k P(depth ≥ k)·(block k and its junction) + Σ_k p_k·(adapter k) + head, as stored. Without `skips` every token
    reads each block once, and junctions as before."""
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
    """What a token needs, the least time the machine takes for it, and the share of that reached."""
    by_bandwidth = asked["bytes"] / rates["bytes_per_second"]
    by_arithmetic = asked["flops"] / max(rates["flops_per_second"].values())
    return {
        **asked,
        "least_ms_by_bandwidth": 1000 * by_bandwidth,
        "least_ms_by_arithmetic": 1000 * by_arithmetic,
        "share_of_bandwidth": by_bandwidth * tokens_per_second,
        "share_of_arithmetic": by_arithmetic * tokens_per_second,
    }
