"""Dense twins: plain Llamas with the same depth, width, number of parameters and data as a recipe's model."""

import re
from dataclasses import replace
from functools import cache

from nvium_core.model.nvium import Nvium
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.recipes.recipe import ModelShape, Recipe

WIDTH_MULTIPLE = 8
RUN = re.compile(r"runs/([^/]+)/model")
"""Matches the `initial` of a recipe that starts from another recipe's model."""


def dense_twin(recipe: Recipe) -> Recipe:
    """Remove exits and adapters, and widen the MLPs in multiples of 8 to at least the same number of parameters.

    The authors use this rule, and it reproduces the widths in the paper. If the recipe starts from another recipe's
    model, the twin starts from the twin of that recipe. The twin of a looped model has a layer for each of its calls,
    and so more parameters.
    """
    depth = recipe.shape.num_layers * recipe.shape.loops
    layers = replace(recipe.shape, num_layers=depth, loops=1, num_exits=1, exit_layers=())
    shape = replace(layers, router_width=None, adapter_width=0)
    missing = num_parameters(recipe.shape) - num_parameters(shape)
    widened = shape.mlp_width + added_mlp_width(max(0, missing), shape.width, shape.num_layers)
    initial = recipe.initial and RUN.sub(r"runs/\1-dense/model", recipe.initial)
    shape = replace(shape, mlp_width=widened)
    return replace(recipe, shape=shape, beta=BetaSettings(initial=0.0), initial=initial)


@cache
def num_parameters(shape: ModelShape) -> int:
    """Count all parameters, without allocating them. A tied head counts once."""
    short = replace(shape, num_layers=shape.num_exits, loops=1, exit_layers=())  # all layers have the same size
    model = Nvium.empty(short.config(shape.vocab_size, end_token=0))
    per_layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    return model.num_parameters() + (shape.num_layers - short.num_layers) * per_layer


def added_mlp_width(num_missing: int, width: int, num_layers: int) -> int:
    """Return the smallest multiple of 8 that, added to the MLPs' width, adds at least `num_missing` parameters."""
    per_multiple = WIDTH_MULTIPLE * 3 * width * num_layers
    return WIDTH_MULTIPLE * -(-num_missing // per_multiple)
