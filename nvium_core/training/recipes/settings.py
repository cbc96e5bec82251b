"""Apply `key=value` settings to a recipe. Keys are dotted paths such as `learning_rate.maximum`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nvium_core.training.recipes.recipe import Recipe, RecipeError

NUMBERS: dict[type, str] = {int: "an integer such as 100000", float: "a number such as 1e-3"}


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Apply settings to a recipe. The last setting of a key wins. Raise `RecipeError` naming invalid settings.

    A number of exits alone replaces the recipe's list of exits by evenly spaced exits.
    """
    changes: dict[str, Change] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: expected key=value")
        if key == "shape.num_exits":
            recipe = replace(recipe, shape=replace(recipe.shape, exit_layers=()))
        _add(changes, recipe, key.split("."), value, setting)
    return _changed(recipe, changes)


@dataclass(frozen=True)
class Change:
    """A field's new value, and the settings that set it. For a nested dataclass, `value` maps fields to changes."""

    value: Any
    settings: tuple[str, ...]


def _add(changes: dict[str, Change], owner: Any, path: list[str], value: str, setting: str) -> None:
    name, *rest = path
    names = {f.name for f in fields(owner)}
    if name not in names:
        raise RecipeError(f"--set {setting}: unknown key {name!r}; must be one of {', '.join(sorted(names))}")
    current = getattr(owner, name)
    if rest and not is_dataclass(current):
        raise RecipeError(f"--set {setting}: {name} has no fields")
    if is_dataclass(current) and not rest:
        raise RecipeError(f"--set {setting}: {name} is a group; set one of its fields, such as {name}.FIELD=…")
    if rest:
        nested = changes.get(name, Change({}, ()))
        _add(nested.value, current, rest, value, setting)
        changes[name] = Change(nested.value, (*nested.settings, setting))
        return
    try:
        changes[name] = Change(parsed(value, get_type_hints(type(owner))[name]), (setting,))
    except ValueError as error:
        raise RecipeError(f"--set {setting}: {error}") from error


def _changed(owner: Any, changes: dict[str, Change]) -> Any:
    values = {
        name: _changed(getattr(owner, name), change.value) if isinstance(change.value, dict) else change.value
        for name, change in changes.items()
    }
    try:
        return replace(owner, **values)
    except ValueError as error:
        options = " ".join(f"--set {setting}" for change in changes.values() for setting in change.settings)
        raise RecipeError(f"{options}: {error}") from error


def parsed(text: str, kind: Any) -> Any:
    """Parse text as a value of type `kind`. If `kind` allows None, `none` means None. Raise `ValueError` if invalid."""
    if isinstance(kind, UnionType):
        [kind] = [choice for choice in get_args(kind) if choice is not NoneType]
        return None if text == "none" else parsed(text, kind)
    if get_origin(kind) is tuple:
        return tuple(parsed(part, get_args(kind)[0]) for part in text.split(",")) if text else ()
    if kind is bool:
        return parsed_choice(text, ("true", "false")) == "true"
    if get_origin(kind) is Literal:
        return parsed_choice(text, get_args(kind))
    return text if kind is str else parsed_number(text, kind)


def parsed_choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}")
    return text


def parsed_number(text: str, kind: type[int] | type[float]) -> int | float:
    """Parse a number. Integers may be written as 1e5."""
    try:
        number = float(text)
    except ValueError as error:
        raise ValueError(f"must be {NUMBERS[kind]}") from error
    if not math.isfinite(number):
        raise ValueError("must be finite")
    if kind is int and not number.is_integer():
        raise ValueError(f"must be {NUMBERS[kind]}")
    return kind(number)
