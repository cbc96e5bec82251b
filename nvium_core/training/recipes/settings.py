"""`key=value` settings applied to a recipe; keys are dotted paths such as `learning_rate.maximum`."""

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nvium_core.training.recipes.recipe import Recipe, RecipeError


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with these settings, the last of each holding. Raises `RecipeError` naming the one that cannot be."""
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: expected key=value")
        recipe = _with(recipe, key.split("."), value, setting)
    return recipe


def _with(owner: Any, path: list[str], value: str, setting: str) -> Any:
    names = {f.name for f in fields(owner)}
    if path[0] not in names:
        raise RecipeError(f"--set {setting}: no such setting; there are {', '.join(sorted(names))}")
    current = getattr(owner, path[0])
    if (len(path) > 1 and not is_dataclass(current)) or (len(path) == 1 and is_dataclass(current)):
        raise RecipeError(f"--set {setting}: not a single value")
    try:
        if len(path) > 1:
            changed = _with(current, path[1:], value, setting)
        else:
            changed = parsed(value, get_type_hints(type(owner))[path[0]])
        return replace(owner, **{path[0]: changed})
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"--set {setting}: {error}") from error


def parsed(text: str, kind: Any) -> Any:
    """The value of a field's type that a text stands for; `none` where there may be none. Raises `ValueError`."""
    if isinstance(kind, UnionType):
        [kind] = [choice for choice in get_args(kind) if choice is not NoneType]
        return None if text == "none" else parsed(text, kind)
    if get_origin(kind) is tuple:
        return tuple(parsed(part, get_args(kind)[0]) for part in text.split(",")) if text else ()
    if kind is bool:
        return parsed_choice(text, ("true", "false"), " or ") == "true"
    if get_origin(kind) is Literal:
        return parsed_choice(text, get_args(kind), ", ")
    return text if kind is str else parsed_number(text, kind)


def parsed_choice(text: str, choices: tuple[str, ...], joint: str) -> str:
    if text not in choices:
        raise ValueError(f"expected {joint.join(choices)}")
    return text


def parsed_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(text.replace("_", ""))
    except ValueError as error:
        raise ValueError(f"expected {kind.__name__}") from error
    if not math.isfinite(number):
        raise ValueError("must be finite")
    return number
