"""`POST /v1/responses`: requests, their conversion to chat requests, and responses."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from server.errors import InvalidField
from server.schemas.aliases import ALIASES
from server.schemas.body import Hint, Int64, NeutralOnly, RequestBody, Text, WithoutEffect, at_most, check, described
from server.schemas.chat import ChatRequest
from server.schemas.foreign import check_elsewhere, check_foreign
from server.schemas.generation import ExitSummary, Metadata, NviumOptions, TokenExits
from server.schemas.messages import MAX_MESSAGES
from server.schemas.tools import MAX_TOOLS, FunctionName

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
PARTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")
CHAT_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "stream"),
    *("user", "safety_identifier", "metadata", "parallel_tool_calls"),
)
"""Fields that have the same name in a chat request."""


class FunctionTool(RequestBody):
    type: Text
    name: FunctionName | None = None
    description: Text | None = None
    parameters: Json | None = None
    strict: bool = False

    def functions(self, param: str) -> Iterator["FunctionTool"]:
        """Yield the functions of this tool. Raise `InvalidField` for a function without a name."""
        if self.type == "function":
            check(self.name is not None, f"{param}.name", "field required")
            yield self

    def as_chat(self) -> Json:
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class ResponseTool(FunctionTool):
    """A function, a `namespace` of functions, or a hosted tool, which is ignored."""

    type: Text
    """`function`, or `namespace` with `tools`. Other tools are ignored."""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = []

    @property
    def unknown_fields(self) -> list[str]:
        return super().unknown_fields if self.type in ("function", "namespace") else [self.type]

    def functions(self, param: str) -> Iterator[FunctionTool]:
        yield from super().functions(param)
        if self.type == "namespace":
            for number, tool in enumerate(self.tools):
                yield from tool.functions(f"{param}.tools[{number}]")


class NamedResponseTool(RequestBody):
    type: Literal["function"]
    name: Text


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Text = "answer"
    description: Text | None = None
    json_schema: Json | None = Field(default=None, alias="schema")
    strict: bool = False

    def as_chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.json_schema, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(RequestBody):
    format: TextFormat = TextFormat(type="text")
    verbosity: Annotated[Any, Hint("medium")] = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Annotated[bool, NeutralOnly(False)] = False


class ResponseRequest(RequestBody):
    """OpenAI's fields, and sampling fields of the other endpoints."""

    aliases = ALIASES

    model: Text
    input: Annotated[
        Text | Annotated[list[Json], Field(min_length=1), at_most(MAX_MESSAGES)],
        described("must be a string or a list of items"),
    ]
    """A user message, or a list of messages, function calls and their outputs."""
    instructions: Text | None = None
    """A system message for this response only. Later responses do not inherit it."""
    previous_response_id: Text | None = None
    """A recent response to continue. The server keeps responses in memory."""
    store: bool = True
    """Keep the response, so its id can be used as `previous_response_id`."""
    max_output_tokens: Int64 | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0
    seed: int | None = None
    stop: Text | list[Text] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedResponseTool,
        described('must be "none", "auto", "required" or {"type": "function", "name": …}'),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    metadata: Metadata = {}
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Annotated[Text | None, WithoutEffect()] = None
    """No effect, because all requests share the prefix cache."""
    nvium: NviumOptions = NviumOptions()

    reasoning: Annotated[Any, Hint({})] = None
    include: Annotated[Any, Hint([])] = None
    truncation: Annotated[Any, NeutralOnly("disabled")] = None
    service_tier: Annotated[Any, NeutralOnly("auto", "default")] = None
    background: Annotated[Any, NeutralOnly(False)] = None
    conversation: Annotated[Any, NeutralOnly(why="; use `previous_response_id`")] = None
    prompt: Annotated[Any, NeutralOnly()] = None
    max_tool_calls: Annotated[Any, NeutralOnly(why=": the client calls the functions")] = None
    top_logprobs: Annotated[Any, NeutralOnly(0, why="; use `/v1/chat/completions`")] = None
    context_management: Annotated[Any, NeutralOnly()] = None
    moderation: Annotated[Any, NeutralOnly()] = None
    prompt_cache_options: Annotated[Any, NeutralOnly({}, {"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[Any, NeutralOnly("in_memory")] = None

    def messages(self) -> list[Json]:
        """Convert the input to chat messages. Raise `InvalidField` for an unsupported item."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Json] = []
        for number, item in enumerate(self.input):
            if item.get("type") != MORE_TOOLS:
                messages = with_item(messages, item, f"input[{number}]")
        return messages

    def functions(self) -> list[FunctionTool]:
        """Return the functions of `tools` and of the input items. Raise `InvalidField` for an invalid tool."""
        given = [(f"tools[{number}]", tool) for number, tool in enumerate(self.tools)]
        for number, item in enumerate(self.input if isinstance(self.input, list) else []):
            if item.get("type") == MORE_TOOLS:
                given += [(f"input[{number}].tools", tool) for tool in more_tools(item, f"input[{number}].tools")]
        return [function for param, tool in given for function in tool.functions(param)]

    def namespace(self, function: str) -> str | None:
        spaces = [tool for tool in self.tools if tool.type == "namespace"]
        return next((tool.name for tool in spaces if any(inner.name == function for inner in tool.tools)), None)

    def as_chat(self, earlier: Sequence[Json]) -> ChatRequest:
        """Convert to a chat request that starts with the `earlier` messages. Raise `InvalidField` if that fails."""
        self.check_neutral()
        check_foreign(self.model_extra or {})
        check_elsewhere(self.model_extra or {}, ChatRequest, "/v1/chat/completions")
        included = self.include if isinstance(self.include, list) else []
        check(LOGPROBS not in included, "include", f"{LOGPROBS} is not supported; use `/v1/chat/completions`")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedResponseTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [tool.as_chat() for tool in self.functions()]
        body = {name: getattr(self, name) for name in CHAT_FIELDS} | {
            "messages": [*system, *earlier, *self.messages()],
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools,
            "tool_choice": choice if tools or choice != "auto" else None,
            "response_format": self.text.format.as_chat(),
            "nvium": self.nvium.model_dump(),
        }
        try:
            return ChatAsResponse.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = RESPONSES_NAMES.get(str(first["loc"][0]), str(first["loc"][0]))
            raise InvalidField(name, first["msg"]) from error


RESPONSES_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
"""Maps a field of chat requests to its name in this endpoint."""


class ChatAsResponse(ChatRequest):
    @property
    def request_names(self) -> dict[str, str]:
        return RESPONSES_NAMES


MORE_TOOLS = "additional_tools"

ARGUMENTS: dict[str, Callable[[Json], tuple[Any, Any]]] = {
    "function_call": lambda item: (item.get("name"), item.get("arguments")),
    "custom_tool_call": lambda item: (item.get("name"), json.dumps({"input": item.get("input")})),
    "local_shell_call": lambda item: ("local_shell", json.dumps(item.get("action"))),
    "mcp_call": lambda item: (item.get("name"), item.get("arguments")),
}
"""For each type of item that is a call, a function that returns the call's name and arguments."""

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")

TEXT_ITEMS = {
    "web_search_call": "action",
    "file_search_call": "queries",
    "code_interpreter_call": "code",
    "mcp_list_tools": "server_label",
}
"""Items about hosted tools, which become text. Maps an item's type to the field that the text quotes."""


def with_item(messages: list[Json], item: Mapping[str, Any], param: str) -> list[Json]:
    """Append an item to chat messages. If the item is a call and the last message is the assistant's, join them."""
    kind = item.get("type", "message")
    if kind == "message":
        message = {"role": item.get("role"), "content": content(item.get("content"), f"{param}.content")}
        if message["role"] == "assistant" and is_only_reasoning(messages):
            return [*messages[:-1], messages[-1] | message]
        return [*messages, message]
    if kind in ARGUMENTS:
        name, arguments = ARGUMENTS[kind](dict(item))
        call_id = item.get("call_id") or item.get("id")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages = with_call(messages, call)
        has_output = item.get("output") is not None
        return [*messages, tool_message(call_id, item["output"], param)] if has_output else messages
    if kind in OUTPUTS:
        return [*messages, tool_message(item.get("call_id") or item.get("id"), item.get("output"), param)]
    if kind in TEXT_ITEMS:
        return [*messages, {"role": "assistant", "content": f"[{kind}: {json.dumps(item.get(TEXT_ITEMS[kind]))}]"}]
    if kind == "reasoning":
        text = content(item.get("content"), f"{param}.content")
        return [*messages, {"role": "assistant", "content": "", "reasoning_content": text}] if text else messages
    supported = ", ".join(("message", "reasoning", *ARGUMENTS, *OUTPUTS, *TEXT_ITEMS, MORE_TOOLS))
    raise InvalidField(f"{param}.type", f"{str(kind)[:100]!r} is not supported; must be one of {supported}")


def with_call(messages: list[Json], call: Json) -> list[Json]:
    if messages and messages[-1]["role"] == "assistant":
        return [*messages[:-1], messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", []), call]}]
    return [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}]


def tool_message(call_id: Any, output: Any, param: str) -> Json:
    return {"role": "tool", "content": content(output, f"{param}.output"), "tool_call_id": call_id}


def more_tools(item: Json, param: str) -> list[ResponseTool]:
    """Return the tools in an input item. Raise `InvalidField` if they are invalid."""
    try:
        return TypeAdapter(list[ResponseTool]).validate_python(item.get("tools"))
    except ValidationError as error:
        raise InvalidField(param, error.errors()[0]["msg"]) from error


def is_only_reasoning(messages: Sequence[Json]) -> bool:
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def content(parts: Any, param: str) -> str | None:
    """Join text parts with newlines. Raise `InvalidField` for parts other than text."""
    if parts is None or isinstance(parts, str):
        return parts
    check(isinstance(parts, list), param, "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        check(kind in PARTS, f"{param}[{number}].type", f"{str(kind)[:100]!r} is not supported; must be text")
        text = part.get("refusal" if kind == "refusal" else "text")
        check(isinstance(text, str), f"{param}[{number}].text", "must be a string")
        texts.append(text)
    return "\n".join(texts)


class OutputPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class OutputItem(TypedDict):
    """Reasoning, a message or a function call."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]
    """Always empty, because `content` has the full reasoning."""
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseExits(TokenExits, ExitSummary):
    """Exits of all tokens, with their summary."""


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: Json
    tool_choice: Any
    tools: list[Json]
    top_p: float
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: ResponseUsage | None
    nvium: NotRequired[ResponseExits]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(TypedDict):
    """A streaming event. Its type determines its optional fields."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputItem]
    part: NotRequired[OutputPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[Any]]
