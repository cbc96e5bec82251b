"""The dense baseline (univium): a Llama, with one exit after the last layer and no adapter."""

from dataclasses import fields
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium


def univium_config(config: NviumConfig) -> NviumConfig:
    """Return the configuration of the dense model with the same backbone."""
    return NviumConfig(**(shape_fields(config) | {"exit_layers": None, "adapter_hidden_size": 0}))


def shape_fields(config: NviumConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}


def as_llama(model: Nvium) -> LlamaForCausalLM:
    """Convert a univium to transformers' class. The weights are shared, not copied."""
    names = {field.name for field in fields(LlamaConfig)} - {"architectures"}
    config = LlamaConfig(**{name: value for name, value in model.config.to_dict().items() if name in names})
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    tensors = model.state_dict()
    tensors["model.norm.weight"] = tensors.pop("exits.0.norm.weight")
    llama.load_state_dict(tensors, assign=True)
    return llama
