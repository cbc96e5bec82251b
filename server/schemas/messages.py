"""What was said before: the messages of a chat, each with text and, of the assistant, calls of functions."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from server.schemas.body import NeutralOnly, RequestBody, Text, at_most, check, described, encodable

MAX_MESSAGES = 4096
MAX_CALLS = 128

ROLES_WITH_CONTENT = ("system", "developer", "user", "tool")
"""An assistant may have called a function instead."""


Name = Annotated[str, Field(pattern=r"^[^\s<|\\/>]{1,64}$"), AfterValidator(encodable)]

NO_CALLS = {"type": ["array", "null"], "maxItems": 0}
"""These say of a schema what `check` and `said` demand: which fields a role has, and a part of a content."""
NOTHING = {"type": "null"}
SAID = {"type": ["string", "array"]}


def turn(*roles: str, needs: Sequence[str], **fields: Any) -> dict[str, Any]:
    return {"properties": {"role": {"enum": list(roles)}, **fields}, "required": list(needs)}


TURNS: list[Any] = [
    turn(
        *("system", "developer", "user"),
        needs=["content"],
        content=SAID,
        tool_call_id=NOTHING,
        refusal=NOTHING,
        tool_calls=NO_CALLS,
    ),
    turn(
        "tool",
        needs=["content", "tool_call_id"],
        content=SAID,
        tool_call_id={"type": "string"},
        refusal=NOTHING,
        tool_calls=NO_CALLS,
    ),
    turn("assistant", needs=["content"], content=SAID, tool_call_id=NOTHING),
    turn("assistant", needs=["refusal"], refusal={"type": "string"}, tool_call_id=NOTHING),
    turn("assistant", needs=["tool_calls"], tool_calls={"type": "array", "minItems": 1}, tool_call_id=NOTHING),
]
PARTS: list[Any] = [
    {"properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": ["type", kind]}
    for kind in ("text", "refusal")
]


class ContentPart(RequestBody):
    model_config = ConfigDict(json_schema_extra={"anyOf": PARTS})

    type: Text
    """`text`, or of the assistant `refusal`; images, sounds and files are refused."""
    text: Text | None = None
    refusal: Text | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None
    """Prefixes are always shared, wherever they end."""

    def said(self, param: str) -> str:
        """Its text. Raises `InvalidField` for images, sounds and files."""
        check(self.type in ("text", "refusal"), f"{param}.type", f"{self.type!r} is not supported; only text is")
        text = self.text if self.type == "text" else self.refusal
        check(text is not None, f"{param}.{self.type}", "is missing")
        return text or ""


Content = Annotated[
    Text | Annotated[list[ContentPart], Field(fail_fast=True)],
    described("must be a string or a list of text parts, valid Unicode"),
]


class FunctionCall(RequestBody):
    name: Text
    arguments: Text

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object, as chat templates expect them; those that are none, as they came."""
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
    """One turn. What a content's parts say is joined by newlines; a refusal is what the assistant said."""

    model_config = ConfigDict(json_schema_extra={"anyOf": TURNS})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """A developer's is a system message."""
    content: Content | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    """What the assistant thought before; templates may show it."""
    name: Name | None = None
    tool_call_id: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), at_most(MAX_CALLS)] = []
    audio: Annotated[Any, NeutralOnly(why=": there is no sound here")] = None
    function_call: Annotated[Any, NeutralOnly(why="; `tool_calls` replaced it")] = None

    def said(self, param: str) -> str | None:
        """Its text; None if it has none. Raises `InvalidField` for content that is no text."""
        if isinstance(self.content, list):
            return "\n".join(part.said(f"{param}.content[{number}]") for number, part in enumerate(self.content))
        return self.refusal if self.content is None else self.content

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; a developer's is a system message."""
        role = "system" if self.role == "developer" else self.role
        named = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        fields = {"role": role, "content": self.said("") or "", **{k: v for k, v in named.items() if v is not None}}
        return fields | ({"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {})

    def check(self, param: str) -> None:
        """Raise `InvalidField` for what does not go together."""
        has_said = self.said(param) is not None
        check(has_said or self.role not in ROLES_WITH_CONTENT, f"{param}.content", "is missing")
        check(has_said or bool(self.tool_calls), f"{param}.content", "must be there where there are no tool_calls")
        is_assistant = self.role == "assistant"
        check(is_assistant or not self.tool_calls, f"{param}.tool_calls", "only the assistant calls functions")
        check(is_assistant or self.refusal is None, f"{param}.refusal", "only the assistant refuses")
        has_thought = self.reasoning_content is not None
        check(is_assistant or not has_thought, f"{param}.reasoning_content", "only the assistant thinks")
        answers = self.tool_call_id is not None
        check(answers == (self.role == "tool"), f"{param}.tool_call_id", "must be given by role tool, and only by it")


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)]


def check_messages(messages: list[Message]) -> None:
    """Raise `InvalidField` naming the message and its field."""
    for number, message in enumerate(messages):
        message.check(f"messages[{number}]")
