"""Request fields that control the chat template, with the tools and the choice among them."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag
from transformers import PreTrainedTokenizerBase

from nvium_core.text.answer_parsers import SWITCH
from nvium_core.text.chat_template import ChatTemplate, Conversation
from server.errors import InvalidField
from server.schemas.body import Ignored, MaxItems, RequestBody, Text, described, require, tagged
from server.schemas.json_text import JsonError, check_counts
from server.schemas.messages import Message
from server.structured_outputs.grammars import JsonSchema, arguments

FunctionName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

MAX_TOOLS = 128

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

OWN_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "template"}
"""Parameters of the renderer, which `chat_template_kwargs` must not set."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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


class TemplateOptions(RequestBody):
    tools: Tools = []
    add_generation_prompt: bool | None = None
    """Start the assistant's turn at the end of the prompt. By default `true`, unless the last message is continued."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's."""
    chat_template_kwargs: Annotated[dict[str, Any], MaxItems(64)] = {}
    """Variables for the chat template, except arguments of `apply_chat_template`."""
    enable_thinking: bool | None = None
    """The template variable of the same name."""
    reasoning_effort: Effort | None = None
    """`none` sets `enable_thinking` to false, other values to true, unless it is given. Ignored if the template has no
    such variable."""

    def conversation_of(self, messages: Sequence[Message], tools: Sequence[Tool | CustomTool]) -> Conversation:
        """Return the arguments of the chat template. Raise `InvalidField` if tools contradict each other."""
        last, continues = messages[-1], self.continue_final_message
        if continues and len(messages) > 1 and not (last.text or last.reasoning_content):
            messages, continues = messages[:-1], False  # nothing to continue, so begin the turn
        adds_prompt = not continues and (self.continue_final_message or self.add_generation_prompt is not False)
        thinks = {} if self.enable_thinking is None else {SWITCH: self.enable_thinking}
        effort = {} if self.reasoning_effort is None else {SWITCH: self.reasoning_effort != "none"}
        return Conversation(
            [message.for_template() for message in messages],
            [tool.for_template() for tool in unique(tools)],
            adds_prompt,
            continues,
            effort | self.chat_template_kwargs | thinks,
        )

    def ineffective(self, template: ChatTemplate) -> list[str]:
        """Return the names of fields that have no effect on this template."""
        is_given = self.enable_thinking is not None or SWITCH in self.chat_template_kwargs
        ignored = [SWITCH] if self.enable_thinking is not None and not template.switches_thinking else []
        has_effect = self.reasoning_effort is None or (template.switches_thinking and not is_given)
        return ignored if has_effect else [*ignored, self.name_of("reasoning_effort")]

    def check_template(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidField` for a reserved template variable or a message that cannot be continued."""
        own = next((name for name in self.chat_template_kwargs if name in OWN_ARGUMENTS), None)
        require(own is None, f"chat_template_kwargs.{own}", "not allowed: an argument of apply_chat_template")
        thinking = self.chat_template_kwargs.get(SWITCH, self.enable_thinking)
        agrees = self.enable_thinking in (None, thinking)
        require(agrees, "enable_thinking", "must equal chat_template_kwargs.enable_thinking")
        arguments = [call.function.arguments for message in messages for call in message.tool_calls]
        try:
            check_counts(*(text.encode() for text in arguments))
        except JsonError as error:
            raise InvalidField("messages", f"the JSON in the arguments of tool calls {error}") from error
        last = messages[-1]
        fits = last.role == "assistant" and not self.add_generation_prompt and not last.tool_calls
        needs = "requires a last message of role assistant without tool calls, and no add_generation_prompt"
        require(fits or not self.continue_final_message, "continue_final_message", needs)
