"""Models with random weights and given exit shares, to measure the speed of a shape without training.

A shape is layers × width, such as "24x768". The other sizes follow the paper's tables. Or it is the name of a published
model, such as "ouro-1.4b".
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import initialization as init

from nvium_core.engine.validation import require
from nvium_core.model.backbones import backbone_fields
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig
from nvium_core.model.exits import CONTINUE, EXIT, Exit, Gate
from nvium_core.training.recipes.recipe import swiglu_width

ROUTER_WIDTHS = {768: 512}  # `hidden_size` → width of the authors' routers, where it is not ⌊0.66 d⌋

HEAD_WIDTH = 64
CONTEXT = 1024
WEIGHT_STD = 0.02

PAPER_ROUTING = (0.145703, 0.259934, 0.344640, 0.246770)
"""Exit shares p_k of the paper's 4-vium with shape 24 × 768. The printed shares add up to 0.997."""


OURO_1_4B: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 49_152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
}
"""config.json of ByteDance/Ouro-1.4B (arXiv 2510.25741), without the fields that we do not read."""

PUBLISHED = {"ouro-1.4b": OURO_1_4B}


def random_weights(config: NviumConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> NviumForCausalLM:
    with torch.device(device), init.no_init_weights():
        model: NviumForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    nn.Module.to(model, device)  # moves the rotary frequencies, which are always computed on the CPU
    fill(model, seed=0)
    return model


def shape_config(shape: str, num_exits: int = 4, vocab_size: int = 32_000, num_loops: int = 1) -> NviumConfig:
    """Return a configuration with evenly placed exits, or an exit after each of several loops.

    Raise `InvalidRequest` for a wrong shape or number of exits.
    """
    if shape in PUBLISHED:
        require(num_loops == 1, "loops", f"cannot be combined with {shape}, which has its own")
        fields = PUBLISHED[shape] | {"max_position_embeddings": CONTEXT}
        return NviumConfig(**backbone_fields(fields.pop("model_type"), fields))
    parts = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})", shape)
    num_layers, width = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    known = num_layers > 0 and width > 0 and width % HEAD_WIDTH == 0
    wanted = f"must be {' or '.join(PUBLISHED)}, or layers x width such as 24x768, with a width in {HEAD_WIDTH}s"
    require(known, "shape", f"{wanted}, got {shape!r}")
    require(num_loops in (1, num_exits), "routing", f"must have a share for each of the {num_loops} loops")
    placed = 1 <= num_exits <= num_layers * num_loops
    require(placed, "num_exits", f"must be between 1 and the {num_layers} layers, got {num_exits}")
    return NviumConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=swiglu_width(width),
        num_hidden_layers=num_layers,
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=CONTEXT,
        num_loops=num_loops,
        exit_layers=[k * num_layers * num_loops // num_exits for k in range(1, num_exits + 1)],
        router_hidden_size=ROUTER_WIDTHS.get(width),
    )


@torch.no_grad()
def fill(model: NviumForCausalLM, seed: int) -> None:
    """Set norms to 1 and biases to 0. Draw all other weights from Normal(0, WEIGHT_STD)."""
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
    """Make the exit shares p_k equal to `routing`, normalised, at every position.

    The router heads get zero weights, so that only their biases decide. The biases are float32 or better.
    """
    require(len(routing) == model.config.num_exits, "routing", f"must have {model.config.num_exits} shares")
    is_valid = min(routing) >= 0 and 0 < sum(routing) < float("inf")
    require(is_valid, "routing", f"must be non-negative and not all zero, got {list(routing)}")
    for exit_, odds in zip(list(model.exits)[:-1], exit_odds(routing), strict=True):
        router = cast(Exit, exit_).router
        assert router is not None
        weight = router.head.weight.zero_()
        bias = odds.log() * router.temperature
        if isinstance(router, Gate):
            bias = bias[EXIT : EXIT + 1] - bias[CONTINUE]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        router.head.bias = nn.Parameter(bias.to(weight.device, dtype))


def exit_odds(routing: Sequence[float]) -> Iterator[torch.Tensor]:
    """Yield (1 − w_k, w_k) for each early exit: w_k = p_k / Σ_{j≥k} p_j. If no token reaches exit k, w_k = 1."""
    for k, share in enumerate(routing[:-1]):
        rest = sum(routing[k + 1 :])
        odds_2 = torch.zeros(2, dtype=torch.float64)
        odds_2[CONTINUE], odds_2[EXIT] = (rest, share) if rest + share else (0, 1)
        yield odds_2 / odds_2.sum()
