"""`POST /v1/responses`: requests, their conversion to chat requests, and responses."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from nvium_core.errors import rephrase
from server.errors import MISSING, InvalidField, code_of
from server.schemas.body import ECHOED, TOO_MANY, Ignored, MaxItems, RequestBody, Text, Unsupported, described, require
from server.schemas.chat import ChatRequest
from server.schemas.generation import ConversationRequest, ExitSummary, Metadata, TokenExits
from server.schemas.messages import MAX_MESSAGES, MAX_PARTS
from server.schemas.response_items import MORE_TOOLS, Json, messages_of
from server.schemas.template import MAX_TOOLS, Effort, FunctionName
from server.schemas.unsupported import check_elsewhere, check_unsupported

LOGPROBS = "message.output_text.logprobs"
CHAT_FIELDS = {"metadata"} | ConversationRequest.model_fields.keys() - {"nvium"}
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
            require(self.name is not None, f"{param}.name", "is missing", code=MISSING)
            yield self

    def as_chat(self) -> Json:
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class ResponseTool(FunctionTool):
    """A function, a `namespace` of functions, or a hosted tool, which is ignored."""

    type: Text
    """`function`, or `namespace` with `tools`. Custom and hosted tools are ignored."""
    tools: Annotated[list[FunctionTool], MaxItems(MAX_TOOLS)] = []

    def unknown_fields(self) -> Iterator[str]:
        return super().unknown_fields() if self.type in ("function", "namespace") else iter([self.type])

    def functions(self, param: str) -> Iterator[FunctionTool]:
        yield from super().functions(param)
        if self.type == "namespace":
            for number, tool in enumerate(self.tools):
                yield from tool.functions(f"{param}.tools[{number}]")


def with_few_functions(tools: Any) -> Any:
    """Count the tools and the functions of their namespaces, before each tool is validated."""
    given = tools if isinstance(tools, list) else []
    inner = [tool["tools"] for tool in given if isinstance(tool, dict) and isinstance(tool.get("tools"), list)]
    if (number := len(given) + sum(map(len, inner))) > MAX_TOOLS:
        raise PydanticCustomError(TOO_MANY, f"must have at most {MAX_TOOLS} tools, also in namespaces, got {number}")
    return tools


ResponseTools = Annotated[list[ResponseTool], MaxItems(MAX_TOOLS), BeforeValidator(with_few_functions)]
TOOLS_ADAPTER = TypeAdapter[list[ResponseTool]](ResponseTools)


class NamedResponseTool(RequestBody):
    type: Literal["function"]
    name: Text


class AllowedResponseTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], Field(min_length=1), MaxItems(MAX_TOOLS)]


def as_chat_choice(choice: Any) -> Any:
    if isinstance(choice, NamedResponseTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedResponseTools):
        chosen = {"mode": choice.mode, "tools": [as_chat_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": chosen}
    return choice


class TextFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Text = "answer"
    description: Text | None = None
    json_schema: Json | None = Field(default=None, alias="schema")
    strict: bool = False

    def echoed(self) -> Json:
        is_schema = self.type == "json_schema"
        return self.model_dump(by_alias=True, exclude_none=True) if is_schema else {"type": self.type}

    def as_chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.json_schema, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(RequestBody):
    format: TextFormat = TextFormat(type="text")
    verbosity: Annotated[Any, Ignored("medium")] = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: Annotated[bool, Unsupported(False)] = False


class ResponseReasoning(RequestBody):
    effort: Effort | None = None
    """As `reasoning_effort` in chats."""
    max_tokens: Annotated[Any, Unsupported(-1, why="; use `thinking_budget` in `/v1/chat/completions`")] = None


class ResponseRequest(ConversationRequest):
    """OpenAI's fields, and sampling fields of the other endpoints."""

    model: Text = "default"
    """The model's id."""
    input: Annotated[
        Text | Annotated[list[Json], Field(min_length=1), MaxItems(MAX_MESSAGES)],
        described("must be a string or a list of items"),
        ECHOED,
    ]
    """A user message, or a list of messages, function calls and their outputs."""
    instructions: Text | None = None
    """A system message for this response only. Later responses do not inherit it."""
    previous_response_id: Text | None = None
    """A recent response to continue. The server keeps responses in memory."""
    store: bool = True
    """Keep the response, so its id can be used as `previous_response_id`."""
    max_output_tokens: int | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[ResponseTools, ECHOED] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools,
        described(
            'must be "none", "auto", "required", {"type": "function", "name": …} or '
            '{"type": "allowed_tools", "mode": …, "tools": …}'
        ),
        ECHOED,
    ] = "auto"
    text: Annotated[TextOptions, ECHOED] = TextOptions()
    metadata: Metadata = {}
    reasoning: ResponseReasoning = ResponseReasoning()
    include: Annotated[list[Text], MaxItems(64)] = []
    """`message.output_text.logprobs`: return the log-probabilities of the text's tokens. Other values are ignored."""
    top_logprobs: int | None = None
    """Number of alternatives, 0 to 20. Requires `include`."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """`auto`: if the input exceeds the context, drop its oldest messages. The answer then has room for
    `max_output_tokens` or, by default, a quarter of the context."""

    background: Annotated[Any, Unsupported(False)] = None
    conversation: Annotated[Any, Unsupported(why="; use `previous_response_id`")] = None
    prompt: Annotated[Any, Unsupported()] = None
    max_tool_calls: Annotated[Any, Unsupported(why=": the client calls the functions")] = None
    context_management: Annotated[Any, Unsupported()] = None

    def unknown_fields(self) -> Iterator[str]:
        yield from super().unknown_fields()
        if {*self.include} - {LOGPROBS}:
            yield "include"

    @property
    def items(self) -> list[Json]:
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def functions(self) -> list[FunctionTool]:
        """Return the functions of `tools` and of the input items. Raise `InvalidField` for an invalid tool."""
        given = [(f"tools[{number}]", tool) for number, tool in enumerate(self.tools)]
        for number, item in enumerate(self.items):
            if item.get("type") == MORE_TOOLS:
                param = f"input[{number}].tools"
                given += [(param, tool) for tool in more_tools(item, param)]
                require(len(given) <= MAX_TOOLS, param, f"all tools together must be at most {MAX_TOOLS}")
        return [function for param, tool in given for function in tool.functions(param)]

    def namespace(self, function: str) -> str | None:
        spaces = [tool for tool in self.tools if tool.type == "namespace"]
        return next((tool.name for tool in spaces if any(inner.name == function for inner in tool.tools)), None)

    def as_chat(self, earlier: Sequence[Json]) -> ChatRequest:
        """Convert to a chat request that starts with the `earlier` items. Raise `InvalidField` if that fails."""
        check_unsupported(self)
        check_elsewhere(self.model_extra or {}, ChatRequest, "/v1/chat/completions")
        num_parts = sum(len(parts) for item in self.items for parts in item.values() if isinstance(parts, list))
        require(num_parts <= MAX_PARTS, "input", f"must have at most {MAX_PARTS} content parts, got {num_parts}")
        is_scored = LOGPROBS in self.include
        require(is_scored or not self.top_logprobs, "top_logprobs", f"only allowed when include has {LOGPROBS}")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = as_chat_choice(self.tool_choice)
        tools = [tool.as_chat() for tool in self.functions()]
        body = {name: getattr(self, name) for name in CHAT_FIELDS & self.model_fields_set} | {
            "model": self.model,
            "messages": [*system, *messages_of(earlier), *messages_of(self.items)],
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "logprobs": is_scored,
            "top_logprobs": self.top_logprobs,
            "tools": tools,
            "tool_choice": choice if tools or choice != "auto" else None,
            "response_format": self.text.format.as_chat(),
            "nvium": self.nvium,
        }
        try:
            return ChatAsResponse.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = RESPONSES_NAMES.get(str(first["loc"][0]), str(first["loc"][0]))
            raise InvalidField(name, rephrase(first["msg"]), code=code_of(first["type"])) from error


RESPONSES_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "threshold": "nvium.threshold",
}
"""Maps a field of chat requests to its name in this endpoint."""


class ChatAsResponse(ChatRequest):
    @property
    def request_names(self) -> dict[str, str]:
        return RESPONSES_NAMES


def more_tools(item: Json, param: str) -> list[ResponseTool]:
    """Return the tools in an input item. Raise `InvalidField` if they are invalid."""
    try:
        return TOOLS_ADAPTER.validate_python(item.get("tools"))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidField(param, rephrase(first["msg"]), code=code_of(first["type"])) from error


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
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    usage: ResponseUsage | None
    nvium: NotRequired[ResponseExits]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(TypedDict):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
