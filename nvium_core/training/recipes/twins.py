"""Dense twins: for any recipe the plain Llama it is compared with, of the same depth, width, parameters and data."""

import re
from dataclasses import replace

from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe

WIDTH_MULTIPLE = 8
RUN = re.compile(r"runs/([^/]+)/model")
"""What a recipe starts from, where that is another recipe's model."""


def dense_twin(recipe: Recipe) -> Recipe:
    """The recipe without exits and adapters, its MLP widened by the fewest multiples of 8 that leave it no smaller.

    That is the authors' rule, and gives their widths. What is a dense model already, but for CALM*'s norms and a
    retrofit's exits, keeps its width. A model that starts from another's run has a twin that starts from its twin's.
    """
    bare = without_exits(recipe)
    if recipe.method != "nvium":
        return bare
    shape = bare.shape
    missing = num_parameters(recipe) - num_parameters(bare)
    widened = shape.mlp_width + added_mlp_width(missing, shape.width, shape.num_layers)
    initial = recipe.initial and RUN.sub(r"runs/\1-dense/model", recipe.initial)
    return replace(bare, shape=replace(shape, mlp_width=widened), initial=initial)


def added_mlp_width(num_missing: int, width: int, num_layers: int) -> int:
    """The fewest multiples of 8 by which MLPs are widened to hold so many parameters more."""
    per_multiple = WIDTH_MULTIPLE * 3 * width * num_layers
    return WIDTH_MULTIPLE * -(-num_missing // per_multiple)


def without_exits(recipe: Recipe) -> Recipe:
    """The recipe of the backbone alone."""
    shape = replace(recipe.shape, num_exits=1, exit_layers=(), router_width=None, adapter_width=0)
    return replace(recipe, method="nvium", shape=shape, beta=BetaSettings(initial=0.0))
