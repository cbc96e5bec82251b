"""FLOPs per token, which PyTorch counts for a model without weights."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium


def flops_per_token(config: NviumConfig, num_positions: int) -> float:
    """FLOPs of a token that passes all exits and attends to `num_positions` positions, as in training and scoring.

    A multiply-add counts as two. Norms, rotary embeddings and softmaxes are not counted (paper, breakdown of FLOPs).
    """
    with FlopCounterMode(display=False) as counter:
        Nvium.empty(config)(torch.zeros(1, num_positions, dtype=torch.long, device="meta"))
    return counter.get_total_flops() / num_positions
