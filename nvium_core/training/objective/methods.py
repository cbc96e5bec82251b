"""Training methods: the model that a run builds and the objective that it minimises."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from nvium_core.training.initial import initial_model
from nvium_core.training.objective.loss import nvium_objective
from nvium_core.training.objective.objective import ObjectiveFunction
from nvium_core.training.recipes.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """A model and an objective. `build` takes the recipe, the vocabulary size and the end-of-text token."""

    build: Callable[[Recipe, int, int], PreTrainedModel]
    objective: ObjectiveFunction


NVIUM = Method(initial_model, nvium_objective)
"""Trains an N-vium. A dense model is an N-vium with one exit and no adapter."""
