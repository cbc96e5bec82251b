"""Count the parameters of a recipe's model on the meta device, without allocating them."""

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from nvium_core.model.causal_lm import NviumForCausalLM
from nvium_core.training.recipes.recipe import ModelShape


@cache
def num_parameters(shape: ModelShape) -> int:
    """Count all parameters, including embedding, head and exits. A tied head counts once."""
    short = replace(shape, num_layers=shape.num_exits, exit_layers=())  # all layers have the same size
    with torch.device("meta"):
        model = NviumForCausalLM(short.config(shape.vocab_size, end_token=0))
    return numel(model) + (shape.num_layers - short.num_layers) * numel(model.model.layers[0])


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
