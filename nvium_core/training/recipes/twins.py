"""Dense twins: the plain Llama that a recipe is compared with, of the same depth, width, parameters and data."""

import re
from dataclasses import replace

from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe

WIDTH_MULTIPLE = 8
RUN = re.compile(r"runs/([^/]+)/model")
"""`initial` of a recipe that starts from another recipe's model."""


def dense_twin(recipe: Recipe) -> Recipe:
    """The recipe without exits and adapters, its MLP widened by the fewest multiples of 8 that make it no smaller.

    That is the authors' rule, and gives their widths. The twin of a model that starts from another's run starts from
    that one's twin.
    """
    bare = without_exits(recipe)
    shape = bare.shape
    missing = num_parameters(recipe) - num_parameters(bare)
    widened = shape.mlp_width + added_mlp_width(missing, shape.width, shape.num_layers)
    initial = recipe.initial and RUN.sub(r"runs/\1-dense/model", recipe.initial)
    return replace(bare, shape=replace(shape, mlp_width=widened), initial=initial)


def added_mlp_width(num_missing: int, width: int, num_layers: int) -> int:
    """The fewest multiples of 8 by which MLPs must widen to hold `num_missing` more parameters."""
    per_multiple = WIDTH_MULTIPLE * 3 * width * num_layers
    return WIDTH_MULTIPLE * -(-num_missing // per_multiple)


def without_exits(recipe: Recipe) -> Recipe:
    shape = replace(recipe.shape, num_exits=1, exit_layers=(), router_width=None, adapter_width=0)
    return replace(recipe, shape=shape, beta=BetaSettings(initial=0.0))
