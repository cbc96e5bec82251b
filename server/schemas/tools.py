"""The functions that a chat may or must call."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from server.generation import grammars
from server.schemas.body import RequestBody, Text, at_most, check, described

FunctionName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

MAX_TOOLS = 128

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(RequestBody):
    """Takes no arguments without `parameters`. Their schema always holds; `strict` closes objects that declare none."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def signature(self, *, closes: bool) -> grammars.Signature:
        return grammars.Signature(self.schema_of_parameters, is_strict=self.strict, closes=closes)

    @property
    def schema_of_parameters(self) -> dict[str, Any]:
        return NO_PARAMETERS if self.parameters is None else self.parameters


class Tool(RequestBody):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        about = {} if self.function.description is None else {"description": self.function.description}
        function = {"name": self.function.name, **about, "parameters": self.function.schema_of_parameters}
        return {"type": self.type, "function": function}


Tools = Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)]


class NamedFunction(RequestBody):
    name: Text


class NamedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    described('must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'),
]


def unique(tools: Sequence[Tool]) -> list[Tool]:
    """Each once. Raises `InvalidField` for different functions of the same name."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        is_same = by_name.setdefault(tool.function.name, tool) == tool
        check(is_same, "tools", f"two functions have the name {tool.function.name}")
    return [*by_name.values()]


def callable_tools(tools: list[Tool], choice: ToolChoice | None) -> list[Tool]:
    """The tools that may be called. Raises `InvalidField`."""
    tools = unique(tools)
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return []
    check(bool(tools), "tool_choice", "there are no tools to choose from")
    if choice == "required":
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    check(bool(named), "tool_choice", f"there is no tool {choice.function.name!r}")
    return named
