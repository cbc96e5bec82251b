"""The messages of a chat: one model for each kind of turn, chosen by its role.

Whatever an answer of this server held is accepted as a turn of the assistant.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from server.schemas.body import NeutralOnly, RequestBody, Text, WithoutEffect, at_most, encodable, told_apart

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Bound on the contents of all messages, each of which is validated on the event loop."""

MAX_CALLS = 1024

Name = Annotated[str, Field(pattern=r"^[^\s<|\\/>]{1,64}$"), AfterValidator(encodable)]
NoRefusal = Annotated[Any, NeutralOnly(why=": only the assistant refuses")]
NoReasoning = Annotated[Any, NeutralOnly(why=": only the assistant thinks")]
NoToolCalls = Annotated[Any, NeutralOnly([], why=": only the assistant calls functions")]
NoPrefix = Annotated[Any, NeutralOnly(False, why=": only the assistant's turn is continued")]
NoToolCallId = Annotated[Any, NeutralOnly(why=": only role tool answers a call")]


class Part(RequestBody):
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, WithoutEffect()] = None
    """Prefixes are always shared, whatever their length."""


class TextPart(Part):
    type: Literal["text"]
    """`text`, or `refusal`; images, sounds and files are refused."""
    text: Text


class RefusalPart(Part):
    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


def kind_of_part(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return f"{kind} part" if kind in ("text", "refusal") else None


def kind_of_content(content: Any) -> str | None:
    if isinstance(content, str):
        return "one text"
    return "text parts" if isinstance(content, list) and all(isinstance(part, dict) for part in content) else None


ContentPart = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")],
    told_apart(kind_of_part, by="type", message="is not supported; only text is"),
]
Content = Annotated[
    Annotated[Text, Tag("one text")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("text parts")],
    told_apart(kind_of_content, message="must be a string or a list of text parts"),
]


class FunctionCall(RequestBody):
    name: Text
    arguments: Text

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object, as chat templates expect them; text that is not JSON stays text."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(RequestBody):
    id: Text
    type: Literal["function"]
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


class Message(RequestBody):
    """Fields of every turn. Content in parts is joined by newlines."""

    same = {"reasoning": "reasoning_content"}

    role: str
    content: Content | None = None
    refusal: NoRefusal = None
    reasoning_content: NoReasoning = None
    name: Name | None = None
    tool_call_id: NoToolCallId = None
    tool_calls: NoToolCalls = []
    prefix: NoPrefix = False
    partial: NoPrefix = False
    audio: Annotated[Any, NeutralOnly(why=": there is no sound here")] = None
    function_call: Annotated[Any, NeutralOnly(why="; `tool_calls` replaced it")] = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; a developer's is a system message."""
        role = "system" if self.role == "developer" else self.role
        named = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        fields = {"role": role, "content": self.text, **{k: v for k, v in named.items() if v is not None}}
        return fields | ({"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {})


class PromptMessage(Message):
    role: Literal["system", "developer", "user"]
    """A developer's is a system message."""
    content: Content


class ToolMessage(Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: Text
    """Of the call that it answers."""


class AssistantMessage(Message):
    role: Literal["assistant"]
    refusal: Text | None = None
    reasoning_content: Text | None = None
    """The assistant's earlier thoughts, also as `reasoning`; templates may show them."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), at_most(MAX_CALLS)] = []
    prefix: bool = False
    """Of the last message: the same as `continue_final_message`."""
    partial: bool = False
    """Another name of `prefix`."""

    @property
    def text(self) -> str:
        return super().text or self.refusal or ""


KINDS = {
    **dict.fromkeys(("system", "developer", "user"), "prompt message"),
    "tool": "tool message",
    "assistant": "assistant message",
}


def kind_of_message(message: Any) -> str | None:
    if not isinstance(message, dict):
        return "prompt message"  # which refuses it as no object
    role = message.get("role")
    return KINDS.get(role) if isinstance(role, str) else None


AnyMessage = Annotated[
    Annotated[PromptMessage, Tag("prompt message")]
    | Annotated[ToolMessage, Tag("tool message")]
    | Annotated[AssistantMessage, Tag("assistant message")],
    told_apart(kind_of_message, by="role", message="must be system, developer, user, assistant or tool"),
]


def with_few_parts(messages: Any) -> Any:
    """Refuses many parts before looking at them."""
    if not isinstance(messages, list):
        return messages
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_PARTS:
        raise PydanticCustomError("too_many", f"at most {MAX_PARTS} parts of content are allowed, got {num_parts}")
    return messages


Messages = Annotated[
    list[AnyMessage],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(with_few_parts),
    at_most(MAX_MESSAGES),
]
