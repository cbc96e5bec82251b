"""Models by shape alone, for measuring speed without training: random weights, and routing forced to given shares.

A shape is written layers × width, such as "24x768"; the rest follows the paper's tables.
"""

import re
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import initialization as init

from nvium_core.engine.params import require
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT, Exit

MLP_WIDTHS = {128: 344, 256: 688, 512: 1376, 768: 2048, 1024: 2736, 1536: 4096, 2048: 5632}
"""Inner width of the feed-forward layers by the model's width (paper, scaling tables; 2048 as in models of 1B)."""

ROUTER_WIDTHS = {768: 512}
"""Router widths of the authors' models that are not ⌊0.66 d⌋."""

HEAD_WIDTH = 64
CONTEXT = 1024
WEIGHT_STD = 0.02

PAPER_ROUTING = (0.145703, 0.259934, 0.344640, 0.246770)
"""p_k of the paper's 24 × 768 4-vium, as printed; they add up to 0.997."""


def random_weights(
    config: NviumConfig, *, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> NviumForCausalLM:
    """A model with random weights (`fill`)."""
    with torch.device(device), init.no_init_weights():
        model: NviumForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    nn.Module.to(model, device)  # rotary frequencies are computed on the CPU
    fill(model, seed)
    return model


def shape_config(shape: str, num_exits: int = 4, vocab_size: int = 32_000) -> NviumConfig:
    """The configuration of a shape, with evenly placed exits, l_k = ⌊k · L / N⌋. Raises `InvalidRequest` for an invalid
    shape or too many exits."""
    parts = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,5})", shape)
    num_layers, width = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    widths = ", ".join(map(str, MLP_WIDTHS))
    known = num_layers > 0 and width in MLP_WIDTHS
    require(known, "shape", f"must be layers x width, such as 24x768, of width {widths}, got {shape!r}")
    placed = 1 <= num_exits <= num_layers
    require(placed, "num_exits", f"must be between 1 and the {num_layers} layers, got {num_exits}")
    return NviumConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=MLP_WIDTHS[width],
        num_hidden_layers=num_layers,
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=CONTEXT,
        exit_layers=[k * num_layers // num_exits for k in range(1, num_exits + 1)],
        router_hidden_size=ROUTER_WIDTHS.get(width),
    )


@torch.no_grad()
def fill(model: NviumForCausalLM, seed: int) -> None:
    """Set norms to 1, biases to 0 and the rest to normal numbers small enough to keep outputs finite."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0, WEIGHT_STD, generator=generator)


@torch.no_grad()
def force_routing(model: NviumForCausalLM, routing: Sequence[float]) -> None:
    """Make p_k the same at every position: `routing`, one share per exit, normalised.

    Router heads keep only their biases, in float32 or better so that p_k is exact in any precision.
    """
    require(len(routing) == model.config.num_exits, "routing", f"must hold {model.config.num_exits} shares")
    is_valid = min(routing) >= 0 and 0 < sum(routing) < float("inf")
    require(is_valid, "routing", f"must be shares that are not negative and not all zero, got {list(routing)}")
    for exit_, odds in zip(list(model.exits)[:-1], exit_odds(routing), strict=True):
        router = cast(Exit, exit_).router
        assert router is not None
        weight = router.head.weight.zero_()
        bias_2 = odds.log() * router.temperature
        dtype = torch.promote_types(weight.dtype, torch.float32)
        router.head.bias = nn.Parameter(bias_2.to(weight.device, dtype))


def exit_odds(routing: Sequence[float]) -> Iterator[torch.Tensor]:
    """(1 − w_k, w_k) of each early exit, w_k = p_k / Σ_{j≥k} p_j; w is 1 at an exit that is never reached."""
    for k, share in enumerate(routing[:-1]):
        rest = sum(routing[k + 1 :])
        odds_2 = torch.zeros(2, dtype=torch.float64)
        odds_2[CONTINUE], odds_2[EXIT] = (rest, share) if rest + share else (0, 1)
        yield odds_2 / odds_2.sum()
