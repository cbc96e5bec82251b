"""Tools and the choice among them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from server.schemas.body import Ignored, MaxItems, RequestBody, Text, described, require, tagged
from server.structured_outputs.grammars import JsonSchema, arguments

FunctionName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

MAX_TOOLS = 128

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(RequestBody):
    """A function, by default without arguments. `strict` rejects schemas that cannot be enforced."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def arguments(self) -> JsonSchema:
        return arguments(self.schema_of_parameters, is_strict=self.strict)

    @property
    def schema_of_parameters(self) -> dict[str, Any]:
        return NO_PARAMETERS if self.parameters is None else self.parameters


class Tool(RequestBody):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        about = {} if self.function.description is None else {"description": self.function.description}
        function = {"name": self.function.name, **about, "parameters": self.function.schema_of_parameters}
        return {"type": self.type, "function": function}


class CustomTool(RequestBody):
    type: Literal["custom"]
    custom: Annotated[Any, Ignored()] = None
    """Custom tools are ignored; use functions."""


AnyTool = Annotated[
    Annotated[Tool, Tag("function tool")] | Annotated[CustomTool, Tag("custom tool")],
    tagged("type", {"function": "function tool", "custom": "custom tool", None: "function tool"}, "must be 'function'"),
]
Tools = Annotated[list[AnyTool], MaxItems(MAX_TOOLS)]


class NamedFunction(RequestBody):
    name: Text


class NamedTool(RequestBody):
    type: Literal["function"]
    function: NamedFunction


class ToolSubset(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), MaxItems(MAX_TOOLS)]


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    described(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": …}}'
    ),
]


def unique(tools: Sequence[Tool | CustomTool]) -> list[Tool]:
    """Return the functions without duplicates. Raise `InvalidField` if different functions share a name."""
    by_name: dict[str, Tool] = {}
    for tool in (tool for tool in tools if isinstance(tool, Tool)):
        is_same = by_name.setdefault(tool.function.name, tool) == tool
        require(is_same, "tools", f"different functions have the same name {tool.function.name}")
    return [*by_name.values()]
