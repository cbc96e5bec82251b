"""All recipes by name. `nvium train NAME` runs a recipe, `nvium recipes` lists them.

- tiny, small: the paper's comparisons at a size that one core trains in minutes, to check that the trends agree. All
  read the same number of tokens, so they are comparable. β is lower than in the paper, because the exits of small
  models differ less. With the paper's β of 0.15, nearly all tokens leave at the first exit.
- tales, stories-24, stories-chat: story models. Two CPU cores can train all but `stories-24`, which takes eight minutes
  on an H200.
- paper: the paper's models (arXiv 2605.13190), by layers and width. Details missing in the paper are from the authors'
  code. They have a vocabulary of 32,000 tokens, windows of 1,024 tokens, and 20 tokens of text per parameter. The paper
  uses C4 with Llama 2's tokenizer. Here, the tokenizer is trained on the text of `--data` unless `tokenizer` is set.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.optimizer import BetaSettings, LearningRate, OptimizerSettings, RouterWarmup
from nvium_core.training.recipes.recipe import ModelShape, Recipe, RecipeError, dense_twin, num_parameters, swiglu_width
from nvium_core.training.recipes.settings import with_settings

HEAD_WIDTH = 32


def tiny() -> Recipe:
    """Return a recipe for trying out training. It takes minutes on one core. The model's text makes no sense."""
    return Recipe(
        shape=ModelShape(num_layers=4, width=64, mlp_width=176, num_heads=2, num_exits=4, vocab_size=512, context=128),
        total_tokens=1_000_000,
        tokens_per_step=2048,
        learning_rate=LearningRate(maximum=6e-3, warmup=0.05),
        router_warmup=RouterWarmup(share=0.2),
        beta=BetaSettings(initial=0.002, depth=0.7),
        optimizer=OptimizerSettings(muon_rate=0.04),
        checkpoint_every=50,
    )


def small(num_layers: int = 12, width: int = 96) -> Recipe:
    """Return the recipe of a small model with four evenly spaced exits. `width` is a multiple of 32."""
    if width % HEAD_WIDTH:
        raise ValueError(f"width must be a multiple of {HEAD_WIDTH}, got {width}")
    shape = ModelShape(
        num_layers=num_layers,
        width=width,
        mlp_width=swiglu_width(width),
        num_heads=width // HEAD_WIDTH,
        num_exits=4,
        vocab_size=1024,
        context=256,
    )
    return Recipe(
        shape=shape,
        total_tokens=2_000_000,
        tokens_per_step=2048,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.02, kind="wsd", decay=0.65, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.1),
        beta=BetaSettings(initial=0.02),
        optimizer=OptimizerSettings(muon_rate=0.02),  # without Muon, nearly all tokens leave at the first exit
    )


BUNDLED = Path(__file__).parents[2] / "checkpoints" / "stories-24m"


def tales() -> Recipe:
    """Return a recipe for books: 6.5M parameters and four exits."""
    return Recipe(
        shape=ModelShape(
            num_layers=12, width=192, mlp_width=512, num_heads=3, num_exits=4, vocab_size=2048, context=1024
        ),
        total_tokens=16_000_000,
        tokens_per_step=4096,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.01, kind="wsd", decay=0.65, final_ratio=0.0),
        beta=BetaSettings(initial=0.02, depth=0.685),
        optimizer=OptimizerSettings(muon_rate=0.02),
    )


def stories_24() -> Recipe:
    """Return the recipe of the bundled model: tales, requests answered by tales, and pieces of books, in one run.

    `python -m research.tales ask` writes the data. Exits gain more than with the vocabulary of 2,048 in `tales`, and 24
    layers are enough for early exits to save time.
    """
    recipe = tales()
    return replace(
        recipe,
        shape=replace(recipe.shape, num_layers=24, width=256, mlp_width=704, num_heads=4, vocab_size=8192),
        tokenizer=str(BUNDLED),
        text="conversations",
        total_tokens=108_134_400,
        tokens_per_step=32_768,
        router_warmup=RouterWarmup(share=0.1),
        beta=BetaSettings(initial=0.0, depth=0.63),
    )


def stories_chat() -> Recipe:
    """Return a recipe that fine-tunes `stories-24` on conversations, with a second decay of the learning rate.

    The bundled model was trained by four such runs, two of them shorter ones (see its model card).
    """
    recipe = stories_24()
    return replace(
        recipe,
        initial="runs/stories-24/model",
        tokenizer=None,
        total_tokens=1_433_600,
        tokens_per_step=4096,
        learning_rate=LearningRate(maximum=8e-4, warmup=0.02, kind="wsd", decay=0.98, final_ratio=0.0),
        router_warmup=RouterWarmup(share=0.0, min_steps=0),
        beta=BetaSettings(initial=0.0085, depth=0.635),
        optimizer=OptimizerSettings(muon_rate=0.002),
    )


WIDTHS = {
    128: (4, 88, 1e-3, 2**16),
    256: (8, 176, 1e-3, 2**17),
    512: (8, 344, 1e-3, 2**18),
    768: (12, 512, 4e-4, 2**18),
    1024: (16, 688, 3e-4, 2**19),
    1536: (24, 1016, 3e-4, 2**19),
}
"""Width → heads, width of the routers, learning rate (as Pythia's) and tokens per step of the paper's models."""


def pretrained(num_layers: int, width: int) -> Recipe:
    """Return the recipe of a row in the scaling tables, with four exits and a fixed β.

    The paper trained 48x1536 in another way: 12 heads, learning rate 2e-4 (warm-up, stable, decay), adaptive β.

    Raise `ValueError` for another width than `WIDTHS`.
    """
    if width not in WIDTHS:
        raise ValueError(f"the width must be one of {', '.join(map(str, WIDTHS))}")
    num_heads, router_width, learning_rate, tokens_per_step = WIDTHS[width]
    shape = ModelShape(
        num_layers=num_layers,
        width=width,
        mlp_width=swiglu_width(width),
        num_heads=num_heads,
        num_exits=4,
        exit_layers=(1, 2, 4, 6) if num_layers == 6 else (),  # the authors' exits; otherwise they are evenly spaced
        router_width=router_width,
        vocab_size=32_000,
        context=1024,
    )
    return Recipe(
        shape=shape,
        total_tokens=20 * num_parameters(shape),
        tokens_per_step=tokens_per_step,
        learning_rate=LearningRate(maximum=learning_rate),
        beta=BetaSettings(initial=0.15),
        seed=42,
        evaluations=20,
        validation_tokens=5_000_000,
    )


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
        shown.add_row(
            name, layers, str(shape.num_exits), *(f"{count / 1e6:,.1f}" for count in counts), f"{rate:g}", f"{beta:g}"
        )
    return shown
