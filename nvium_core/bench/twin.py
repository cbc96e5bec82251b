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

PARTS = (
    *("qkv_bias", "qk_norm", "no_rope_layers", "attention_bias", "mlp_bias", "mlp_gated", "hidden_act"),
    *("num_loops", "norms_loops", "layer_norms", "router", "windows", "window_rope_parameters"),
    *("attention_scale", "attention_cap", "logit_cap", "embedding_scale", "residual_scale", "logit_scale"),
)
"""Fields of optional parts. Their defaults are Llama's."""


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
    missing = num_parameters(config) - num_parameters(twin)
    twin.intermediate_size += added_mlp_width(missing, config.hidden_size, config.num_hidden_layers)
    return twin


def num_parameters(config: NviumConfig) -> int:
    return Nvium.empty(config).num_parameters()
