"""Turns the fields of a dataclass into options of a command."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Optional, get_origin, get_type_hints

import typer
from typing_extensions import Doc

from nvium_core.choices import Device

Command = Callable[..., None]

ModelArgument = Annotated[str | None, typer.Argument(help="A folder, Hub name or GGUF file [the bundled model].")]
DeviceOption = Annotated[Device, typer.Option(help="auto is CUDA if available.")]


def takes(declaration: type, *names: str) -> Callable[[Command], Command]:
    """Add an option to a command for each field of a dataclass that has a `Doc`. `names` selects some of these fields.

    The command's `**given` has only the options that the user has set. All other options have the dataclass's defaults.
    The option of a tuple field may be repeated, and accepts several values separated by commas.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        declared = declared_options(declaration, names)
        added = {name: option for name, option in declared.items() if name not in signature.parameters}

        @wraps(command)
        def with_options(**given: Any) -> None:
            left_out = [name for name in added if given.get(name) in (None, [])]
            texts = {name: ",".join(given[name]) for name in added if isinstance(given.get(name), list)}
            command(**{name: value for name, value in (given | texts).items() if name not in left_out})

        parameters = [*own, *added.values()]
        with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


def declared_options(declaration: Any, names: tuple[str, ...]) -> dict[str, inspect.Parameter]:
    """Return a parameter of the command for each field. The default None means that the option is not set."""
    types, marked = get_type_hints(declaration), get_type_hints(declaration, include_extras=True)
    declared = dict[str, inspect.Parameter]()
    for field in fields(declaration):
        name, kind, hint = field.name, types[field.name], marked[field.name]
        if get_origin(hint) is not Annotated or (names and name not in names):
            continue
        doc = next(mark.documentation for mark in hint.__metadata__ if isinstance(mark, Doc)).removesuffix(".")
        is_list = get_origin(kind) is tuple
        option = typer.Option(help=f"{doc}{shown(field.default)}.", metavar="<str,…>" if is_list else None)
        annotation: Any = Annotated[Optional[list[str] if is_list else kind], option]  # noqa: UP045 (not a literal type)
        declared[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return declared


def shown(default: object) -> str:
    """Return the default in brackets. Return nothing for an empty default, which the help text explains."""
    if default in (None, (), ""):
        return ""
    if isinstance(default, bool):
        return f" [{'on' if default else 'off'}]"
    return f" [{default:,}]" if isinstance(default, int) and default > 9999 else f" [{default}]"
