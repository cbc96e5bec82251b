"""The number of parameters of a recipe's model, counted on the meta device: nothing is allocated."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.baselines.calm import build_calm
from nvium_core.training.baselines.layerskip import build_layerskip
from nvium_core.training.recipes.recipe import Method, ModelShape, Recipe

BUILD: dict[Method, Callable[[NviumConfig], NviumForCausalLM]] = {"calm": build_calm, "layerskip": build_layerskip}


def num_parameters(recipe: Recipe) -> int:
    """Embedding, head and exits included; a tied head counts once."""
    return counted(recipe.shape, recipe.method)


@cache
def counted(shape: ModelShape, method: Method) -> int:
    """Counts a model with one layer for each exit, and adds the other layers, which are all alike."""
    short = replace(shape, num_layers=shape.num_exits, exit_layers=())
    with torch.device("meta"):
        model = BUILD.get(method, NviumForCausalLM)(short.config(shape.vocab_size, end_token=0))
    return numel(model) + (shape.num_layers - short.num_layers) * numel(model.model.layers[0])


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
