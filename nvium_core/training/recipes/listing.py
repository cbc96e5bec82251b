"""The table of recipes: what each trains, on how much text, and its dense twin."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.recipes.catalogue import RECIPES
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.recipes.twins import dense_twin

CAPTION = "dense: of the twin, which is NAME-dense; --json says more."


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Parameters count embedding, head and exits; `dense` is the twin, `NAME-dense`."""

    name: str
    method: str
    parameters: int
    dense_parameters: int
    layers: int
    width: int
    mlp_width: int
    dense_mlp_width: int
    exit_layers: list[int]
    tokens: int
    tokens_per_step: int
    steps: int
    context: int
    learning_rate: float
    beta: float
    starts_from: str | None


def entry(name: str, recipe: Recipe) -> Entry:
    shape, twin = recipe.shape, dense_twin(recipe)
    return Entry(
        name=name,
        method=recipe.method,
        parameters=num_parameters(recipe),
        dense_parameters=num_parameters(twin),
        layers=shape.num_layers,
        width=shape.width,
        mlp_width=shape.mlp_width,
        dense_mlp_width=twin.shape.mlp_width,
        exit_layers=shape.exit_depths,
        tokens=recipe.total_tokens,
        tokens_per_step=recipe.tokens_per_step,
        steps=recipe.num_steps,
        context=shape.context,
        learning_rate=recipe.learning_rate.maximum,
        beta=recipe.beta.initial,
        starts_from=recipe.initial,
    )


def entries() -> list[Entry]:
    """Every recipe except the twins, in the catalogue's order."""
    return [entry(name, make()) for name, make in RECIPES.items()]


def table(listed: Sequence[Entry]) -> Table:
    """80 columns wide."""
    columns = ("recipe", "shape", "exits", "M param.", "dense", "M tokens", "rate", "β")
    shown = Table(*columns, box=SIMPLE, padding=(0, 1, 0, 0), caption=CAPTION)
    for column in shown.columns:
        column.no_wrap = True
    for line in listed:
        shown.add_row(*row(line))
    return shown


def row(line: Entry) -> tuple[str, ...]:
    return (
        line.name,
        f"{line.layers}×{line.width}",
        str(len(line.exit_layers)),
        millions(line.parameters),
        millions(line.dense_parameters),
        millions(line.tokens),
        f"{line.learning_rate:g}",
        f"{line.beta:g}",
    )


def millions(count: int) -> str:
    return f"{count / 1e6:,.{2 if count < 1e8 else 0}f}"
