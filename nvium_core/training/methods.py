"""What each training method builds, and what it minimises."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.loss import nvium_objective
from nvium_core.training.objective import ObjectiveFunction
from nvium_core.training.recipes.recipe import Method, Recipe


@dataclass(frozen=True)
class TrainingMethod:
    """`build` makes the untrained model from (recipe, size of the vocabulary, end-of-text token)."""

    build: Callable[[Recipe, int, int], PreTrainedModel]
    objective: ObjectiveFunction


def build_nvium(recipe: Recipe, vocab_size: int, end_token: int) -> NviumForCausalLM:
    return NviumForCausalLM(recipe.shape.config(vocab_size, end_token))


METHODS: dict[Method, TrainingMethod] = {"nvium": TrainingMethod(build_nvium, nvium_objective)}
