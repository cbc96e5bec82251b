"""Models with random weights, to measure the speed of a shape without training: with given exit shares, or dense twins.

A shape is layers × width, such as "24x768". The other sizes follow the paper's tables. Or it is the name of a published
model, such as "ouro-1.4b". A dense twin is a Llama of the same depth and width with a wider MLP and as many parameters.
Speed hardly depends on the weights. A Llama is its own twin. The twin of a looped model runs its layers once.
"""

import re
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import initialization as init

from nvium_core.choices import Quantization, Weights
from nvium_core.engine.device.native.weights import fits_bfloat16
from nvium_core.engine.errors import require
from nvium_core.model.backbones import backbone_fields
from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.model.config import NviumConfig, univium_config
from nvium_core.model.exits import CONTINUE, EXIT, Exit, Gate
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import GROUP, quantize_model
from nvium_core.training.recipes.recipe import added_mlp_width, swiglu_width

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

PARTS = (
    *("qkv_bias", "qk_norm", "no_rope_layers", "attention_bias", "mlp_bias", "mlp_gated", "hidden_act"),
    *("num_loops", "norms_loops", "layer_norms", "router", "windows", "window_rope_parameters"),
    *("attention_scale", "attention_cap", "logit_cap", "embedding_scale", "residual_scale", "logit_scale"),
)
"""Fields of optional parts. Their defaults are Llama's."""


@torch.no_grad()
def random_weights(config: NviumConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> NviumForCausalLM:
    """Build a model with norms of 1 and biases of 0. Draw all other weights from Normal(0, WEIGHT_STD)."""
    with torch.device(device), init.no_init_weights():
        model: NviumForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    nn.Module.to(model, device)  # moves the rotary frequencies, which are always computed on the CPU
    generator = torch.Generator(model.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0, WEIGHT_STD, generator=generator)
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
def force_routing(model: NviumForCausalLM, routing: Sequence[float]) -> None:
    """Make the exit shares p_k equal to `routing`, normalised, at every position.

    The router heads get zero weights, so that only their biases decide. The biases are float32 or better.
    """
    require(len(routing) == model.config.num_exits, "routing", f"must have {model.config.num_exits} shares")
    is_valid = min(routing) >= 0 and 0 < sum(routing) < float("inf")
    require(is_valid, "routing", f"must be non-negative and not all zero, got {list(routing)}")
    for k, exit_ in enumerate(list(model.exits)[:-1]):
        router = cast(Exit, exit_).router
        assert router is not None
        weight = router.head.weight.zero_()
        share, rest = routing[k], sum(routing[k + 1 :])
        odds_2 = torch.zeros(2, dtype=torch.float64)  # w_k = p_k / Σ_{j≥k} p_j, or 1 if no token reaches exit k
        odds_2[CONTINUE], odds_2[EXIT] = (rest, share) if rest + share else (0, 1)
        bias = (odds_2 / odds_2.sum()).log() * router.temperature
        if isinstance(router, Gate):
            bias = bias[EXIT : EXIT + 1] - bias[CONTINUE]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        router.head.bias = nn.Parameter(bias.to(weight.device, dtype))


def dense_twin(model: Nvium, weights: Weights = "auto") -> Nvium:
    """Build the model's twin on the same device, in the same precision and with the same quantization."""
    if is_llama(model.config):
        return model
    config = twin_config(model.config)
    if weights in get_args(Quantization):
        config.intermediate_size += -config.intermediate_size % GROUP
    return random_rival(model, config, weights)


@torch.no_grad()
def random_rival(model: Nvium, config: NviumConfig, weights: Weights) -> Nvium:
    """Build a model with random weights. If the other model's layers are exact in bfloat16, so is this model.

    The engine packs weights in the fewest bits that are exact.
    """
    config.training_tokens = None
    rival = random_weights(config, dtype=model.dtype, device=model.device)
    if all(fits_bfloat16(weight) for weight in model.model.layers.parameters()):
        for weight in rival.parameters():
            weight.copy_(weight.bfloat16())
    quantize_model(rival, weights)
    return rival


def is_llama(config: NviumConfig) -> bool:
    plain = NviumConfig()
    has_parts = any(getattr(config, name) != getattr(plain, name) for name in PARTS)
    return config.num_exits == 1 and not config.adapter_hidden_size and not has_parts


def twin_config(config: NviumConfig) -> NviumConfig:
    """Return a univium with as many parameters as `config`, by a wider MLP. The MLP's width is a multiple of 8."""
    twin = univium_config(config, **{name: getattr(NviumConfig(), name) for name in PARTS})
    missing = Nvium.empty(config).num_parameters() - Nvium.empty(twin).num_parameters()
    twin.intermediate_size += added_mlp_width(missing, config.hidden_size, config.num_hidden_layers)
    return twin
