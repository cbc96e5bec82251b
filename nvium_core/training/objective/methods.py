"""What a training run builds and minimises. The product trains N-viums; other methods are values of the same class."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from nvium_core.training.initial import initial_model
from nvium_core.training.objective.loss import nvium_objective
from nvium_core.training.objective.objective import ObjectiveFunction
from nvium_core.training.recipes.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """`build` makes the model of the first step from (recipe, vocabulary size, end-of-text token)."""

    build: Callable[[Recipe, int, int], PreTrainedModel]
    objective: ObjectiveFunction


NVIUM = Method(initial_model, nvium_objective)
"""An N-vium, or a dense model, which is an N-vium with one exit and no adapter."""
