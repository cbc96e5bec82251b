"""Small random N-viums whose exits and routers differ from each other."""

from typing import Any, TypeVar

import torch

from nvium_core import NviumConfig, NviumForCausalLM

Model = TypeVar("Model", bound=NviumForCausalLM)


def random_model(
    exit_layers: list[int], *, seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 1.0, **shape: Any
) -> NviumForCausalLM:
    """Build a model of a `small_config` with random weights (`randomized`)."""
    return randomized(NviumForCausalLM(small_config(exit_layers, **shape)).to(dtype).eval(), seed, spread)


def small_config(
    exit_layers: list[int],
    *,
    vocab_size: int = 17,
    width: int = 16,
    num_heads: int = 4,
    num_key_heads: int = 2,
    context: int = 64,
    **parts: Any,
) -> NviumConfig:
    """`parts` are more fields of the configuration."""
    return NviumConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=exit_layers[-1] // parts.get("num_loops", 1),
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_heads,
        max_position_embeddings=context,
        exit_layers=exit_layers,
        **({"bos_token_id": 0, "eos_token_id": 0} | parts),
    )


def randomized(model: Model, seed: int, spread: float = 1.0) -> Model:
    """Draw every weight from a normal distribution with deviation of order `spread` / √fan-in; norms are near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = "norm" in name
            scale = 0.1 if is_norm else spread * (1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5)
            parameter.copy_(noise * scale + (1.0 if is_norm else 0.0))
    return model
