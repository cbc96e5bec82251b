"""All recipes by name. `nvium train NAME` runs a recipe, `nvium recipes` lists them."""

from collections.abc import Callable
from difflib import get_close_matches

from huggingface_hub.errors import StrictDataclassError

from nvium_core.training.recipes.paper import PAPER
from nvium_core.training.recipes.recipe import Recipe, RecipeError
from nvium_core.training.recipes.settings import with_settings
from nvium_core.training.recipes.small import SMALL
from nvium_core.training.recipes.tales import TALES
from nvium_core.training.recipes.twins import dense_twin

DENSE = "-dense"

RECIPES: dict[str, Callable[[], Recipe]] = TALES | SMALL | PAPER


def recipe_named(name: str, settings: list[str]) -> Recipe:
    """Return a recipe with `key=value` settings applied. `NAME-dense` is the dense twin of NAME with the same settings.

    The twin starts from the twin of NAME's initial model unless `initial` is set. Raise `RecipeError` if the recipe is
    unknown or a setting is invalid.
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
