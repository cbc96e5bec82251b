"""Checks before a run resumes from a checkpoint."""

from dataclasses import asdict, replace
from pathlib import Path

from nvium_core.training.checkpoint import STATE, State
from nvium_core.training.data.tokens import differences
from nvium_core.training.errors import TrainingError
from nvium_core.training.recipes.recipe import Recipe

CHANGEABLE = {"total_tokens", "epochs", "checkpoint_every", "evaluations"}
"""Settings that may change when a run resumes."""


def check_resumable(state: State, recipe: Recipe, folder: Path) -> None:
    """Raise `TrainingError` if the recipe is not the checkpoint's, or a new length would change past steps."""
    if others := differences(state["recipe"], asdict(recipe)) - CHANGEABLE:
        raise TrainingError(
            f"{folder / STATE}: the checkpoint's {', '.join(sorted(others))} differ from the recipe's; "
            "choose another --folder"
        )
    step, total_tokens = state["step"], state["recipe"]["total_tokens"]
    begun = replace(recipe, total_tokens=total_tokens)
    if begun.num_steps != recipe.num_steps and schedule_at(begun, step) != schedule_at(recipe, step):
        raise TrainingError(
            f"total_tokens cannot change after step {step}: the schedule of past steps depends on it; "
            f"set total_tokens={total_tokens}, or choose another --folder"
        )


def schedule_at(recipe: Recipe, step: int) -> tuple[float, int, bool]:
    """Return a step's learning rate as a share of the maximum, its window, and whether routers still warm up."""
    progress = step / recipe.num_steps
    return (
        round(recipe.learning_rate.share_at(progress), 9),
        recipe.context_at(progress),
        recipe.router_warmup.active(progress),
    )
