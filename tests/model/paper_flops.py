"""FLOPs of the paper's models."""

from nvium_core import NviumConfig
from nvium_core.model.config import even_exit_layers
from nvium_core.model.flops import Flops, flops_per_token

PAPER_POSITIONS = 1024
PER_MILLE = 1e-3


def paper_config(num_layers: int, num_exits: int) -> NviumConfig:
    """Width 768; a dense model has one exit and no adapter."""
    return NviumConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        exit_layers=even_exit_layers(num_layers, num_exits),
        router_hidden_size=512,
        adapter_hidden_size=768 if num_exits > 1 else 0,
    )


def paper_flops(num_layers: int, num_exits: int) -> Flops:
    return flops_per_token(paper_config(num_layers, num_exits), PAPER_POSITIONS)
