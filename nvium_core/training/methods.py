"""What each training method builds, and what it minimises."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from nvium_core.training.initial import initial_model
from nvium_core.training.loss import nvium_objective
from nvium_core.training.objective import ObjectiveFunction
from nvium_core.training.recipes.recipe import Method, Recipe


@dataclass(frozen=True)
class TrainingMethod:
    """`build` makes the model of the first step from (recipe, size of the vocabulary, end-of-text token)."""

    build: Callable[[Recipe, int, int], PreTrainedModel]
    objective: ObjectiveFunction


METHODS: dict[Method, TrainingMethod] = {
    "nvium": TrainingMethod(initial_model, nvium_objective),
    "retrofit": TrainingMethod(initial_model, nvium_objective),
}
