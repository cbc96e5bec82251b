"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from nvium_core import SamplingParams
from server.schemas.body import NeutralOnly, ResponseBody, Text, Whole, check
from server.schemas.generation import Generated, GeneratedChoice, GenerationRequest, Limits, loggable
from server.schemas.messages import Messages, check_messages
from server.schemas.tools import Tool, ToolChoice, Tools, callable_tools


class ChatRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: Whole | None = None
    """Without one, the rest of the context, within the server's limit."""
    max_tokens: Whole | None = None
    """The old name of `max_completion_tokens`; both are taken if they agree."""
    logprobs: bool = False
    """log π_mix of every token."""
    top_logprobs: int | None = None
    """0 to 20 alternatives; only with `logprobs`."""

    tools: Tools = []
    tool_choice: ToolChoice | None = None
    """`none`, `required` or a named function; `auto`, the default with tools, is refused."""
    parallel_tool_calls: bool = True
    """One call is made, whether more are allowed or not."""

    safety_identifier: Text | None = None
    """Stands in the log line of the request, before `user`."""
    prompt_cache_key: Text | None = None
    """Prefixes are always shared, whatever their key."""
    prompt_cache_options: Annotated[Any, NeutralOnly({}, {"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[Any, NeutralOnly("in_memory")] = None
    service_tier: Annotated[Any, NeutralOnly("auto", "default")] = None
    store: Annotated[Any, NeutralOnly(False, why=": nothing is stored")] = None
    metadata: Annotated[Any, NeutralOnly({}, why=": nothing is stored")] = None

    modalities: Annotated[Any, NeutralOnly(["text"])] = None
    reasoning_effort: Annotated[Any, NeutralOnly("none")] = None
    verbosity: Annotated[Any, NeutralOnly("medium")] = None
    audio: Annotated[Any, NeutralOnly()] = None
    prediction: Annotated[Any, NeutralOnly()] = None
    moderation: Annotated[Any, NeutralOnly()] = None
    web_search_options: Annotated[Any, NeutralOnly()] = None
    functions: Annotated[Any, NeutralOnly([], why="; `tools` replaced it")] = None
    function_call: Annotated[Any, NeutralOnly("none", why="; `tool_choice` replaced it")] = None

    @property
    def own_names(self) -> dict[str, str]:
        has_new_name = self.max_completion_tokens is not None
        asked = {"max_tokens": "max_completion_tokens"} if has_new_name else {}
        return {"prompt": "messages", "logprobs": "top_logprobs", **asked}

    @property
    def who(self) -> str | None:
        return super().who if self.safety_identifier is None else loggable(self.safety_identifier)

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them."""
        return [message.for_template() for message in self.messages]

    def callable_tools(self) -> list[Tool]:
        """Of which one is called. Raises `InvalidField`."""
        tools = callable_tools(self.tools, self.tool_choice)
        check(not tools or self.form() is None, "tool_choice", "a call has a form of its own; give no other")
        return tools

    def params(self, room: int, end_of_turn: Sequence[int]) -> SamplingParams:
        """What this asks of the engine, whose context has so much room left. Raises `InvalidRequest`."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        also_stops_at = () if self.ignore_eos else end_of_turn
        return self.sampling(room if asked is None else asked, also_stops_at=also_stops_at, logprobs=logprobs)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        check_messages(self.messages)
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        check(len(given) < 2, "max_tokens", "differs from max_completion_tokens, which replaced it")
        asks_for_logprobs = self.logprobs or self.top_logprobs is None
        check(asks_for_logprobs, "top_logprobs", "only allowed when logprobs is true")


class TopLogprob(ResponseBody):
    """A token by name, log π_mix, and its bytes, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(ResponseBody):
    """What the assistant says, whole or, of a chunk, what is new."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None


class ChatChoice(GeneratedChoice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(GeneratedChoice):
    delta: ChatMessage
    logprobs: ChatLogprobs | None


class Chat(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class ChatChunk(Generated):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
