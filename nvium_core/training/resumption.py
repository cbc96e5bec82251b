"""Checks that a resumed run is the one that its checkpoint began."""

from dataclasses import asdict, replace
from pathlib import Path

from nvium_core.training.checkpoint import STATE, State
from nvium_core.training.data.tokens import differences
from nvium_core.training.errors import TrainingError
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.run_folder import EXTENDABLE


def check_same(state: State, recipe: Recipe, folder: Path) -> None:
    """Raise `TrainingError`, naming what differs, unless the checkpoint is of this recipe."""
    if others := differences(state["recipe"], asdict(recipe)) - EXTENDABLE:
        raise TrainingError(
            f"{folder / STATE}: holds a run with other {', '.join(sorted(others))}; choose another --folder"
        )


def check_length(total_tokens: int, recipe: Recipe, step: int) -> None:
    """Raise `TrainingError` if another length than the checkpoint's `total_tokens` would have changed the rate, window
    or phase of past steps."""
    begun = replace(recipe, total_tokens=total_tokens)
    if begun.num_steps != recipe.num_steps and due(begun, step) != due(recipe, step):
        raise TrainingError(
            f"total_tokens: step {step} of a run begun with {total_tokens:,} is past the time at which "
            "its length may change; give that number, or choose another --folder"
        )


def due(recipe: Recipe, step: int) -> tuple[float, int, bool]:
    """What a step's place in the run decides: the learning rate's share, the window, and whether routers are
    balanced."""
    progress = step / recipe.num_steps
    return (
        round(recipe.learning_rate.share_at(progress), 9),
        recipe.context_at(progress),
        recipe.router_warmup.active(progress),
    )
