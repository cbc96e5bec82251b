"""All recipes by name. `nvium train NAME` runs a recipe, `nvium recipes` lists them."""

from collections.abc import Callable
from difflib import get_close_matches

from huggingface_hub.errors import StrictDataclassError
from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.recipes.paper import PAPER
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe, RecipeError
from nvium_core.training.recipes.settings import with_settings
from nvium_core.training.recipes.small import SMALL
from nvium_core.training.recipes.tales import TALES
from nvium_core.training.recipes.twins import dense_twin

DENSE = "-dense"
CAPTION = "dense: M parameters of the dense twin, NAME-dense."

RECIPES: dict[str, Callable[[], Recipe]] = TALES | SMALL | PAPER


def recipe_named(name: str, settings: list[str]) -> Recipe:
    """Return a recipe with `key=value` settings applied. `NAME-dense` is the dense twin of NAME with the same settings.

    If NAME starts from another recipe's model, the twin starts from that recipe's twin, unless `initial` is set. Raise
    `RecipeError` if the recipe is unknown or a setting is invalid.
    """
    base = name.removesuffix(DENSE)
    if base not in RECIPES:
        close = " or ".join(get_close_matches(base, RECIPES, n=3))
        hint = f"; did you mean {close}?" if close else ";"
        raise RecipeError(f"unknown recipe {name!r}{hint} `nvium recipes` lists all recipes")
    recipe = with_settings(RECIPES[base](), settings)
    if recipe.epochs and any(setting.startswith("total_tokens=") for setting in settings):
        raise RecipeError(f"total_tokens has no effect: {name} has epochs={recipe.epochs:g}; set epochs=0 too")
    try:
        recipe.shape.config(recipe.shape.vocab_size, end_token=0)
        recipe.check_together()
    except (ValueError, StrictDataclassError) as error:
        raise RecipeError(f"recipe {name}: {error.__cause__ or error}") from error
    if base == name:
        return recipe
    return with_settings(dense_twin(recipe), [setting for setting in settings if setting.startswith("initial=")])


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
        millions(num_parameters(recipe.shape)),
        millions(num_parameters(dense_twin(recipe).shape)),
        millions(recipe.total_tokens),
        f"{recipe.learning_rate.maximum:g}",
        f"{recipe.beta.initial:g}",
    )


def millions(count: int) -> str:
    return f"{count / 1e6:,.{2 if count < 1e8 else 0}f}"
