"""Apply `key=value` settings to a recipe. Keys are dotted paths such as `learning_rate.maximum`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from nvium_core.training.recipes.recipe import Recipe, RecipeError

NUMBERS: dict[type, str] = {int: "an integer such as 100000", float: "a number such as 1e-3"}

Setting = tuple[list[str], str, str]
"""The path of a field, its value as text, and the command-line option."""


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Apply settings to a recipe. The last setting of a key wins. Raise `RecipeError` naming invalid settings.

    A number of exits alone replaces the recipe's list of exits by evenly spaced exits.
    """
    found = list[Setting]()
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: expected key=value")
        if key == "shape.num_exits":
            recipe = replace(recipe, shape=replace(recipe.shape, exit_layers=()))
        found.append((key.split("."), value, f"--set {setting}"))
    return changed(recipe, found)


def changed(owner: Any, settings: Sequence[Setting]) -> Any:
    """Return a copy of a dataclass and its groups with settings applied."""
    kinds, values, groups = get_type_hints(type(owner)), dict[str, Any](), dict[str, list[Setting]]()
    names = {field.name for field in fields(owner)}
    for (name, *rest), value, option in settings:
        if name not in names:
            raise RecipeError(f"{option}: unknown key {name!r}; must be one of {', '.join(sorted(names))}")
        if is_dataclass(getattr(owner, name)) != bool(rest):
            is_group = f"is a group; set one of its fields, such as {name}.FIELD=…"
            raise RecipeError(f"{option}: {name} {'has no fields' if rest else is_group}")
        if rest:
            groups.setdefault(name, []).append((rest, value, option))
        else:
            try:
                values[name] = parse_value(value, kinds[name])
            except ValueError as error:
                raise RecipeError(f"{option}: {error}") from error
    values |= {name: changed(getattr(owner, name), group) for name, group in groups.items()}
    try:
        return replace(owner, **values)
    except ValueError as error:
        raise RecipeError(f"{' '.join(option for _, _, option in settings)}: {error}") from error


def parse_value(text: str, kind: Any) -> Any:
    """Parse text as a value of type `kind`. If `kind` allows None, `none` means None. Raise `ValueError` if invalid."""
    if isinstance(kind, UnionType):
        [kind] = [choice for choice in get_args(kind) if choice is not NoneType]
        return None if text == "none" else parse_value(text, kind)
    if get_origin(kind) is tuple:
        return tuple(parse_value(part, get_args(kind)[0]) for part in text.split(",")) if text else ()
    if kind is str:
        return text
    if kind in NUMBERS:
        return parse_number(text, kind)
    choices = get_args(kind) or ("true", "false")  # of a Literal or of a bool
    if text not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}")
    return text == "true" if kind is bool else text


def parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    """Integers may be written as 1e5."""
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"must be {NUMBERS[kind]}") from error
    if not math.isfinite(number):
        raise ValueError("must be finite")
    if kind is int and not number.is_integer():
        raise ValueError(f"must be {NUMBERS[kind]}")
    return kind(number)
