"""`POST /v1/chat/completions`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from nvium_core import Constraint, SamplingParams, ServerOptions
from nvium_core.text.answer_parsers import JSON_LINES, CallFormat
from nvium_core.text.chat_template import Conversation
from server.errors import InvalidField
from server.schemas.body import Ignored, RequestBody, Unsupported, require
from server.schemas.formats import OutputFormat
from server.schemas.generation import (
    NO_LIMIT,
    ConversationRequest,
    Generated,
    GeneratedChoice,
    GenerationRequest,
    PromptTokenIds,
    TokenExits,
    loggable,
)
from server.schemas.messages import Messages
from server.schemas.template import AllowedTools, NamedTool, TemplateOptions, Tool, ToolChoice, unique
from server.structured_outputs.grammars import JsonSchema, ToolCalls

Budget = Annotated[int, Field(ge=NO_LIMIT)]


class ReasoningOptions(RequestBody):
    max_tokens: Budget | None = None
    """Another name of `thinking_budget`."""


class ChatRequest(TemplateOptions, ConversationRequest, GenerationRequest):
    messages: Messages
    max_completion_tokens: int | None = None
    """By default and with −1, the rest of the context. `--max-new-tokens` limits all choices together."""
    max_tokens: int | None = None
    """Deprecated name of `max_completion_tokens`. If both are given, they must be equal."""
    logprobs: bool = False
    """Return log π_mix (with `nvium.sampling: original` or `threshold`, log π_k of the exit) of every token."""
    top_logprobs: int | None = None
    """Number of alternatives, 0 to 20. Requires `logprobs`."""

    tool_choice: ToolChoice | None = None
    """`none`: no calls. `auto` (the default with tools): text or calls. `required`: calls. A function: one call.
    `allowed_tools`: `auto` or `required` with some of the tools. An output format applies to text only."""

    thinking_budget: Budget | None = None
    """Maximum number of tokens between the tags of the reasoning. Then its closing tag is emitted. −1: no limit."""
    reasoning: ReasoningOptions = ReasoningOptions()

    store: Annotated[Any, Unsupported(False, why=": chat completions are not stored")] = None

    add_special_tokens: Annotated[Any, Unsupported(False, why=": the chat template adds them")] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    verbosity: Annotated[Any, Ignored("medium")] = None
    audio: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    functions: Annotated[Any, Unsupported([], why="; use `tools`")] = None
    function_call: Annotated[Any, Unsupported("none", why="; use `tool_choice`")] = None

    @property
    def request_names(self) -> dict[str, str]:
        names = super().request_names | {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.thinking_budget is None:
            names["thinking_budget"] = "reasoning.max_tokens"
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    @property
    def logged_user(self) -> str | None:
        return super().logged_user if self.safety_identifier is None else loggable(self.safety_identifier)

    def conversation(self) -> Conversation:
        return self.conversation_of(self.messages, [] if self.tool_choice == "none" else self.tools)

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call. Raise `InvalidField` if `tool_choice` does not fit them."""
        tools, choice = unique(self.tools), self.tool_choice
        if choice is None or choice == "auto":
            return tools
        if choice == "none":
            return []
        require(bool(tools), "tool_choice", "requires tools")
        if choice == "required":
            return tools
        chosen = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
        names, known = [named.function.name for named in chosen], {tool.function.name for tool in tools}
        unknown = next((name for name in names if name not in known), None)
        require(unknown is None, "tool_choice", f"{unknown!r} is not among the tools")
        return [tool for tool in tools if tool.function.name in names]

    @property
    def may_answer_in_text(self) -> bool:
        return self.tool_choice in (None, "auto") or (
            isinstance(self.tool_choice, AllowedTools) and self.tool_choice.allowed_tools.mode == "auto"
        )

    @property
    def may_call_again(self) -> bool:
        if isinstance(self.tool_choice, NamedTool):
            return False
        is_free = self.may_answer_in_text or self.tool_choice == "none"
        return is_free if self.parallel_tool_calls is None else self.parallel_tool_calls

    @property
    def continued(self) -> str:
        """Return the start of the answer that is already in the last message."""
        return self.messages[-1].text if self.continue_final_message else ""

    def output_format(self, calls: CallFormat | None = JSON_LINES, marker: int | None = None) -> OutputFormat | None:
        """Return the format of the answer. Tool calls have the format of the model's chat template.

        Raise `InvalidField` if fields contradict each other.
        """
        text = super().output_format()
        if not (tools := self.callable_tools()):
            return text
        if calls is None:
            message = "the model's chat template has a call format that is not supported; choose another with "
            raise InvalidField("tools", f"{message}--chat-template FILE")
        if text is not None and not isinstance(text.grammar, JsonSchema):
            require(not self.may_answer_in_text, text.param, "cannot be combined with tools that the model may call")
        if not self.may_answer_in_text:  # the format applies to text only
            text = None
        grammar = ToolCalls(
            {tool.function.name: tool.function.arguments() for tool in tools},
            calls,
            marker,
            is_optional=self.may_answer_in_text,
            is_parallel=self.may_call_again,
            otherwise=text.grammar if text and isinstance(text.grammar, JsonSchema) else None,
        )
        return OutputFormat("tools", grammar, is_text=self.may_answer_in_text and text is None)

    @property
    def requested_max_tokens(self) -> int | None:
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if max_tokens == NO_LIMIT else max_tokens

    @property
    def reasoning_budget(self) -> int | None:
        asked = self.reasoning.max_tokens if self.thinking_budget is None else self.thinking_budget
        return None if asked == NO_LIMIT else asked

    def params(
        self, constraint: Constraint | None, max_tokens: int, end_of_turn: Sequence[int], defaults: Mapping[str, Any]
    ) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, end_of_turn, max_tokens=max_tokens, constraint=constraint, logprobs=logprobs)

    def check(self, limits: ServerOptions) -> None:
        super().check(limits)
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        require(len(given) < 2, "max_tokens", "must equal max_completion_tokens, because it is an alias")
        given = {self.thinking_budget, self.reasoning.max_tokens} - {None}
        require(len(given) < 2, "thinking_budget", "must equal reasoning.max_tokens, because it is an alias")
        self.check_template(self.messages)
        called = set[str]()
        for number, message in enumerate(self.messages):
            called.update(call.id for call in message.tool_calls)
            if message.role == "tool" and message.tool_call_id not in called:
                param = self.request_names.get("messages", f"messages[{number}].tool_call_id")
                raise InvalidField(param, f"no earlier tool call has the id {message.tool_call_id!r:.100}")
        asks_for_logprobs = self.logprobs or not self.top_logprobs
        require(asks_for_logprobs, "top_logprobs", "only allowed when logprobs is true")


class TopLogprob(TypedDict):
    """A token with its log π_mix. Its bytes may be an incomplete character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: Iterable[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


class MadeToolCall(TypedDict):
    """A tool call in a response. In a chunk, the new part of a tool call."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The assistant's message. In a chunk, the new part of the message.

    In a choice's last chunk, `nvium` covers all tokens of the choice: clients that join chunks keep the last `nvium`.
    """

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    """The model's reasoning before the content, if any."""
    reasoning: NotRequired[str]
    """The same text as `reasoning_content`. Some clients read this name."""
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[MadeToolCall]]
    nvium: NotRequired[TokenExits]


class AnyChatChoice(GeneratedChoice):
    logprobs: ChatLogprobs | None


class ChatChoice(AnyChatChoice):
    message: ChatMessage


class ChatChunkChoice(AnyChatChoice):
    delta: ChatMessage


class Chat(Generated, PromptTokenIds):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Generated, PromptTokenIds):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
