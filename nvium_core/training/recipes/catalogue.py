"""All recipes by name. `nvium train NAME` runs a recipe, `nvium recipes` lists them."""

import re
from collections.abc import Callable
from difflib import get_close_matches

from huggingface_hub.errors import StrictDataclassError
from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.recipes.paper import pretrained
from nvium_core.training.recipes.recipe import Recipe, RecipeError
from nvium_core.training.recipes.settings import with_settings
from nvium_core.training.recipes.small import small, tiny
from nvium_core.training.recipes.tales import stories_24, stories_chat, tales
from nvium_core.training.recipes.twins import dense_twin, num_parameters

DENSE = "-dense"
CAPTION = """L: layers. D: width. dense: M parameters of the dense twin, NAME-dense.
--set changes any setting, such as beta.initial=0.1 or shape.num_exits=6."""

RECIPES: dict[str, Callable[[], Recipe]] = {
    "tales": tales,
    "stories-24": stories_24,
    "stories-chat": stories_chat,
    "tiny": tiny,
    "small": small,
}
FAMILIES: dict[str, Callable[[int, int], Recipe]] = {
    "small-LxD": small,
    "paper-LxD": pretrained,
}
"""Recipes of models with L layers of width D, such as `paper-24x768`."""

EXAMPLES = (
    *("small-24x96", "paper-6x768", "paper-12x768", "paper-24x128", "paper-24x256", "paper-24x512", "paper-24x768"),
    *("paper-24x1024", "paper-24x1536", "paper-36x768", "paper-48x768"),
)
"""Members of the families that `nvium recipes` lists: mainly the models of the paper's tables."""

SHAPE = re.compile(r"(?P<family>.+-)(?P<layers>[1-9]\d*)x(?P<width>[1-9]\d*)")


def recipe_named(name: str, settings: list[str]) -> Recipe:
    """Return a recipe with `key=value` settings applied. `NAME-dense` is the dense twin of NAME with the same settings.

    If NAME starts from another recipe's model, the twin starts from that recipe's twin, unless `initial` is set. Raise
    `RecipeError` if the recipe is unknown or a setting is invalid.
    """
    base = name.removesuffix(DENSE)
    recipe = with_settings(built(base), settings)
    try:
        recipe.shape.config(recipe.shape.vocab_size, end_token=0)
    except (ValueError, StrictDataclassError) as error:
        raise RecipeError(f"recipe {name}: {error.__cause__ or error}") from error
    if base == name:
        return recipe
    return with_settings(dense_twin(recipe), [setting for setting in settings if setting.startswith("initial=")])


def built(name: str) -> Recipe:
    """Build a recipe without settings. Raise `RecipeError` if there is none of this name."""
    if name in RECIPES:
        return RECIPES[name]()
    shape = SHAPE.fullmatch(name)
    family = FAMILIES.get(f"{shape['family']}LxD") if shape else None
    if shape and family:
        try:
            return family(int(shape["layers"]), int(shape["width"]))
        except (ValueError, StrictDataclassError) as error:
            raise RecipeError(f"recipe {name}: {error}") from error
    close = " or ".join(get_close_matches(name, [*RECIPES, *EXAMPLES], n=3))
    hint = f"; did you mean {close}?" if close else ";"
    raise RecipeError(f"unknown recipe {name!r}{hint} `nvium recipes` lists all recipes")


def table() -> Table:
    """List the recipes and the families' examples in 80 columns, without the dense twins."""
    columns = ("recipe", "shape", "exits", "M param.", "dense", "M tokens", "rate", "β")
    shown = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0), caption=CAPTION)
    for column in shown.columns:
        column.no_wrap, column.justify = True, "left" if column.header == "recipe" else "right"
    for name in (*RECIPES, *EXAMPLES):
        recipe = built(name)
        shape, rate, beta = recipe.shape, recipe.learning_rate.maximum, recipe.beta.initial
        counts = num_parameters(shape), num_parameters(dense_twin(recipe).shape), recipe.total_tokens
        layers = f"{shape.num_layers}×{shape.width}"
        shown.add_row(name, layers, str(shape.num_exits), *map(millions, counts), f"{rate:g}", f"{beta:g}")
    return shown


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f}"
