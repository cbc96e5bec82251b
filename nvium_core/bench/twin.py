"""The parameter-matched dense twin of an N-vium: a Llama of the same depth and width with a wider MLP.

Its weights are random, because speed hardly depends on them. A Llama is its own twin. The twin of a looped model runs
its layers once.
"""

from typing import get_args

import torch

from nvium_core.bench.shapes import random_weights
from nvium_core.choices import Quantization, Weights
from nvium_core.engine.device.native.packing import fits_bfloat16
from nvium_core.model.config import NviumConfig, univium_config
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import GROUP, quantize_model
from nvium_core.training.recipes.twins import added_mlp_width

NO_PARTS = {"qkv_bias": False, "qk_norm": False, "no_rope_layers": (), "attention_bias": False, "mlp_bias": False}
NO_LOOPS = {"num_loops": 1, "norms_loops": False, "layer_norms": "before", "router": "mlp"}
"""Configuration fields that remove the optional parts that a Llama does not have."""


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
    rival = random_weights(config, dtype=model.dtype, device=model.device)
    if all(fits_bfloat16(weight) for weight in model.model.layers.parameters()):
        for weight in rival.parameters():
            weight.copy_(weight.bfloat16())
    quantize_model(rival, weights)
    return rival


def is_llama(config: NviumConfig) -> bool:
    has_parts = any(getattr(config, name) for name in ("adapter_hidden_size", *NO_PARTS))
    has_loops = any(getattr(config, name) != value for name, value in NO_LOOPS.items())
    return config.num_exits == 1 and not has_parts and not has_loops


def twin_config(config: NviumConfig) -> NviumConfig:
    """Return a univium with as many parameters as `config`, by a wider MLP. The MLP's width is a multiple of 8."""
    twin = univium_config(config, **NO_PARTS, **NO_LOOPS)
    missing = num_parameters(config) - num_parameters(twin)
    twin.intermediate_size += added_mlp_width(missing, config.hidden_size, config.num_hidden_layers)
    return twin


def num_parameters(config: NviumConfig) -> int:
    return Nvium.empty(config).num_parameters()
