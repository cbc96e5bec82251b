"""What each training method builds, and what it minimises."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from nvium_core.model.config import NviumConfig
from nvium_core.training.baselines.calm import build_calm, calm_objective
from nvium_core.training.baselines.layerskip import build_layerskip
from nvium_core.training.initial import initial_model
from nvium_core.training.objective.loss import nvium_objective
from nvium_core.training.objective.objective import ObjectiveFunction
from nvium_core.training.recipes.recipe import Method, Recipe


@dataclass(frozen=True)
class TrainingMethod:
    """`build` makes the model of the first step from (recipe, size of the vocabulary, end-of-text token)."""

    build: Callable[[Recipe, int, int], PreTrainedModel]
    objective: Callable[[Recipe], ObjectiveFunction]


def of_the_shape(build: Callable[[NviumConfig], PreTrainedModel]) -> Callable[[Recipe, int, int], PreTrainedModel]:
    """Adapts a builder of an N-vium's configuration to a recipe."""
    return lambda recipe, vocab_size, end_token: build(recipe.shape.config(vocab_size, end_token))


METHODS: dict[Method, TrainingMethod] = {
    "nvium": TrainingMethod(initial_model, lambda recipe: nvium_objective),
    "retrofit": TrainingMethod(initial_model, lambda recipe: nvium_objective),
    "calm": TrainingMethod(of_the_shape(build_calm), lambda recipe: calm_objective),
    "layerskip": TrainingMethod(of_the_shape(build_layerskip), lambda recipe: recipe.layerskip.objective),
}
