"""The dense baseline: a model with one exit, at the end, and no adapter, which is a Llama."""

from dataclasses import fields
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium

LLAMA_NORM, OUR_NORM = "model.norm.weight", "exits.0.norm.weight"


def univium_config(config: NviumConfig) -> NviumConfig:
    """The dense model with an N-vium's shape."""
    own = {"exit_layers": None, "adapter_hidden_size": 0}
    return NviumConfig(**(shape_fields(config) | own))


def shape_fields(config: NviumConfig) -> dict[str, Any]:
    """Fields shared by all kinds of configurations."""
    return {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}


def as_llama(model: Nvium) -> LlamaForCausalLM:
    """Convert to transformers' own class, sharing the weights."""
    names = {field.name for field in fields(LlamaConfig)} - {"architectures"}
    config = LlamaConfig(**{name: value for name, value in model.config.to_dict().items() if name in names})
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    tensors = model.state_dict()
    llama.load_state_dict({LLAMA_NORM: tensors.pop(OUR_NORM)} | tensors, assign=True)
    return llama
