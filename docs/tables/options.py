"""The options of `nvium serve`, as `nvium_core/options.py` declares them."""

import re
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typing_extensions import Doc

from docs.tables.table import Cell, Table, table
from nvium_core import EngineConfig, ServerOptions
from nvium_core.options import ModelOptions

HINTS = get_type_hints(ServerOptions, include_extras=True)
MODEL = {"model": None} | dict.fromkeys(field.name for field in fields(ModelOptions))
ENGINE = {field.name: None for field in fields(EngineConfig) if field.name not in MODEL}
HEAD = ["option", "variable", "default", ""]


@table
def options_model() -> Table:
    by_name = {field.name: field for field in fields(ServerOptions)}
    return HEAD, [row(by_name[name]) for name in MODEL]


@table
def options_engine() -> Table:
    return HEAD, [row(field) for field in fields(ServerOptions) if field.name in ENGINE]


@table
def options_server() -> Table:
    own = [field for field in fields(ServerOptions) if field.name not in MODEL | ENGINE]
    return HEAD, [row(field) for field in own]


def row(field: Field[Any]) -> list[Cell]:
    described = next(mark.documentation for mark in HINTS[field.name].__metadata__ if isinstance(mark, Doc))
    text, said = re.fullmatch(r"(.*?)(?: \[(.*)\])?\.", described, re.DOTALL).groups()  # type: ignore[union-attr]
    words = ", ".join(f"`{word}`" for word in words_of(HINTS[field.name]))
    described = f"{text}. One of {words}." if words else f"{text}."
    return [flags(field), f"`NVIUM_{field.name.upper()}`", said or default(field.default), described]


def flags(field: Field[Any]) -> str:
    """`MODEL` is the command's argument."""
    if field.name == "model":
        return "`MODEL`"
    name = field.name.replace("_", "-")
    return f"`--{name}`, `--no-{name}`" if isinstance(field.default, bool) else f"`--{name}`"


def words_of(hint: Any) -> tuple[Any, ...]:
    """That a type allows, if it is one of some words, or none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for inner in get_args(hint) for word in words_of(inner))


def default(value: object) -> str | None:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, (), ""):
        return None
    return f"`{value}`"
