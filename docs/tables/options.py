"""Tables of the options of `nvium serve`, from `nvium_core/options.py`."""

import re
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from docs.tables.table import Cell, Table, table
from nvium_core import EngineConfig, ServerOptions
from nvium_core.options import ModelOptions

HINTS = get_type_hints(ServerOptions, include_extras=True)
FIELDS = {field.name: field for field in fields(ServerOptions)}
MODEL = ["model", *(field.name for field in fields(ModelOptions))]
ENGINE = [field.name for field in fields(EngineConfig) if field.name not in MODEL]


@table
def options_model() -> Table:
    return options(MODEL)


@table
def options_engine() -> Table:
    return options(ENGINE)


@table
def options_server() -> Table:
    return options(name for name in FIELDS if name not in (*MODEL, *ENGINE))


def options(names: Iterable[str]) -> Table:
    return ["option", "variable", "default", "description"], [row(FIELDS[name]) for name in names]


def row(field: Field[Any]) -> list[Cell]:
    help_text = next(mark.documentation for mark in HINTS[field.name].__metadata__ if isinstance(mark, Doc))
    text, described = re.fullmatch(r"(.*?)(?: \[(.*)\])?\.", help_text, re.DOTALL).groups()  # type: ignore[union-attr]
    words = ", ".join(f"`{word}`" for word in literals(HINTS[field.name]))
    text = f"{text}. One of {words}." if words else f"{text}."
    return [flags(field), f"`NVIUM_{field.name.upper()}`", described or default(field.default), text]


def flags(field: Field[Any]) -> str:
    if field.name == "model":
        return "`MODEL`"
    name = field.name.replace("_", "-")
    return f"`--{name}`, `--no-{name}`" if isinstance(field.default, bool) else f"`--{name}`"


def literals(hint: Any) -> tuple[Any, ...]:
    """Return the values of all `Literal` types within a type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for inner in get_args(hint) for word in literals(inner))


def default(value: object) -> str | None:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, (), ""):
        return None
    return f"`{value}`"
