"""Chat messages, one model for each kind of role.

A message that this server returned is valid as an assistant message.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.errors import WRONG_FIELD
from server.schemas.body import TOO_MANY, MaxItems, RequestBody, Text, Unsupported, encodable, tagged

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Maximum number of content parts and tool calls in all messages. Validating them blocks the event loop."""

Name = Annotated[str, Field(pattern=r"^[^\s<|\\/>]{1,64}$"), AfterValidator(encodable)]
OnlyAssistant = Annotated[Any, Unsupported(why=": only for role assistant")]


class Part(RequestBody):
    prompt_cache_breakpoint: dict[str, Any] | None = None
    """No effect, because all requests share the prefix cache."""


class TextPart(Part):
    type: Literal["text"]
    """`text` or `refusal`. Images, audio and files are not supported."""
    text: Text


class RefusalPart(Part):
    type: Literal["refusal"]
    text: Text = Field(alias="refusal")


def kind_of_content(content: Any) -> str | None:
    if isinstance(content, str):
        return "one text"
    return "text parts" if isinstance(content, list) and all(isinstance(part, dict) for part in content) else None


ContentPart = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")],
    tagged(
        "type",
        {"text": "text part", "refusal": "refusal part"},
        "must be text or refusal; images, audio and files are not supported",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("one text")] | Annotated[list[ContentPart], MaxItems(MAX_PARTS), Tag("text parts")],
    Discriminator(kind_of_content, WRONG_FIELD, "must be a string or a list of text parts"),
]


class FunctionCall(RequestBody):
    name: Text
    arguments: Text


class ToolCall(RequestBody):
    id: Text
    type: Literal["function"]
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call for the chat template. Arguments that are not JSON stay a string."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


REASONING = AliasChoices("reasoning_content", "reasoning")
Prefilled = Annotated[Any, Unsupported(False, why="; use `continue_final_message`")]


class Message(RequestBody):
    """Fields of every message. Content parts are joined by newlines."""

    role: str
    content: Content | None = None
    refusal: OnlyAssistant = None
    reasoning_content: OnlyAssistant = Field(default=None, validation_alias=REASONING)
    name: Name | None = None
    tool_call_id: Annotated[Any, Unsupported(why=": only for role tool")] = None
    tool_calls: Annotated[Any, Unsupported([], why=": only for role assistant")] = ()
    prefix: Prefilled = None
    partial: Prefilled = None
    audio: Annotated[Any, Unsupported(why=": audio is not supported")] = None
    function_call: Annotated[Any, Unsupported(why="; use `tool_calls`")] = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""

    def for_template(self) -> dict[str, Any]:
        """Return the message for the chat template."""
        named = {name: getattr(self, name) for name in ("name", "tool_call_id", "reasoning_content")}
        fields = {"role": self.role, "content": self.text, **{k: v for k, v in named.items() if v is not None}}
        return fields | ({"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {})


class PromptMessage(Message):
    role: Literal["system", "developer", "user"]
    """`developer` is the same as `system`."""
    content: Content


class ToolMessage(Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: Text
    """The id of the call that this message answers."""


class AssistantMessage(Message):
    role: Literal["assistant"]
    refusal: Text | None = None
    reasoning_content: Text | None = Field(default=None, validation_alias=REASONING)
    """The reasoning of an earlier answer, also accepted as `reasoning`. Templates may use it."""
    tool_calls: Annotated[list[ToolCall], MaxItems(MAX_PARTS)] = []

    @property
    def text(self) -> str:
        return super().text or self.refusal or ""


AnyMessage = Annotated[
    Annotated[PromptMessage, Tag("prompt message")]
    | Annotated[ToolMessage, Tag("tool message")]
    | Annotated[AssistantMessage, Tag("assistant message")],
    tagged(
        "role",
        dict.fromkeys(("system", "developer", "user"), "prompt message")
        | {"tool": "tool message", "assistant": "assistant message"},
        "must be system, developer, user, assistant or tool",
    ),
]


def with_few_parts(messages: Any) -> Any:
    """Count the parts and calls of all messages, before each message is validated."""
    given = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    lists = [message[name] for name in ("content", "tool_calls") for message in given if name in message]
    num_parts = sum(len(parts) for parts in lists if isinstance(parts, list))
    if num_parts > MAX_PARTS:
        message = f"must have at most {MAX_PARTS} content parts and tool calls, got {num_parts}"
        raise PydanticCustomError(TOO_MANY, message)
    return messages


Messages = Annotated[list[AnyMessage], Field(min_length=1), MaxItems(MAX_MESSAGES), BeforeValidator(with_few_parts)]
