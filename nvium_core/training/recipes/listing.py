"""The table that `nvium recipes` prints."""

from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.recipes.catalogue import RECIPES
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.recipes.twins import dense_twin

CAPTION = "dense: M parameters of the dense twin, NAME-dense."


def table() -> Table:
    """List all recipes except the dense twins, in 80 columns."""
    columns = ("recipe", "shape", "exits", "M param.", "dense", "M tokens", "rate", "β")
    shown = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0), caption=CAPTION)
    for column in shown.columns:
        column.no_wrap = True
    for name, make in RECIPES.items():
        shown.add_row(name, *row(make()))
    return shown


def row(recipe: Recipe) -> tuple[str, ...]:
    return (
        f"{recipe.shape.num_layers}×{recipe.shape.width}",
        str(recipe.shape.num_exits),
        millions(num_parameters(recipe)),
        millions(num_parameters(dense_twin(recipe))),
        millions(recipe.total_tokens),
        f"{recipe.learning_rate.maximum:g}",
        f"{recipe.beta.initial:g}",
    )


def millions(count: int) -> str:
    return f"{count / 1e6:,.{2 if count < 1e8 else 0}f}"
