"""The request and response fields that completions and chat share."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from nvium_core import FinishReason, InvalidRequest, Sampling, SamplingParams, ServerOptions, with_defaults
from server.errors import OUT_OF_RANGE, WRONG_FIELD
from server.schemas.body import MaxItems, RequestBody, Text, Unsupported, described, encodable, require
from server.schemas.formats import OutputFormat, ResponseFormat, StructuredOutputs
from server.schemas.unsupported import check_unsupported

AnswerEnd = Literal[FinishReason, "tool_calls"]
"""The `finish_reason` of an answer. Only a chat can end with `tool_calls`."""

NO_LIMIT = -1  # the value of `max_tokens` and `top_k` that means no limit

PARAMS = {field.name for field in fields(SamplingParams)}
"""The engine's sampling parameters. A request's fields of these names are passed on."""

Stop = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(encodable)]
Stops = Annotated[
    Stop | Annotated[list[Stop], MaxItems(4)],
    described("must be a string or a list of strings, each of 1 to 10,000 characters (valid Unicode)"),
]


def short(metadata: dict[str, str]) -> dict[str, str]:
    if any(len(name) > 64 or len(text) > 512 for name, text in metadata.items()):
        raise PydanticCustomError("too_long", "keys must have at most 64 characters and values at most 512")
    return metadata


Metadata = Annotated[dict[Text, Text], MaxItems(16), AfterValidator(short)]


class StreamOptions(RequestBody):
    include_usage: bool = False
    """Send the usage in a final chunk."""
    continuous_usage_stats: bool = False
    """Send the usage so far in every chunk, unless `include_usage` is `false`."""
    include_obfuscation: Annotated[bool, Unsupported(False)] = False

    @property
    def counts_continuously(self) -> bool:
        is_off = "include_usage" in self.model_fields_set and not self.include_usage
        return self.continuous_usage_stats and not is_off


class NviumOptions(RequestBody):
    """Options of this server. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")

    sampling: Sampling | None = None
    """`exits`: sample from the exit that the routers choose. `mixture`: from the mixture of all exits. `original`: from
    the last exit. `threshold`: from the first exit whose cumulative probability is at least `threshold`, which is not
    an exact sample of the mixture. Default: `--sampling`, or the model's own."""
    threshold: float | None = None
    """Above 0; 1 or more is the last exit. Only with `sampling: threshold`. Default: `--exit-threshold`."""
    early_exits: bool = True
    """Return each token as soon as it exits. `false`: run all layers first. The tokens are the same."""
    metadata: bool = True
    """Return the exits of the tokens, in `nvium`."""
    text_offsets: bool = False
    """Return where each token's characters start in the text."""
    probabilities: bool = False
    """Return p_k of all exits. Costs as much as `logprobs`."""

    @model_validator(mode="before")
    @classmethod
    def _threshold_is_not_null(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("threshold", 1) is None:
            raise PydanticCustomError(f"{WRONG_FIELD}threshold", "must be a number, got null")
        return body


class AnswerRequest(RequestBody):
    """Fields of all endpoints that generate text."""

    model: Text
    """The model's id, or `default`."""
    seed: int | None = None
    """A 64-bit seed for reproducible sampling. Random by default."""
    temperature: float = 1.0
    """0 to 2. 0 selects the most probable token of the mixture (with `original` or `threshold`: of the exit)."""
    top_p: float = 1.0
    """In (0, 1]. 1: off."""
    top_k: int = 0
    """Sample only from the `top_k` most probable tokens. 0 or −1: off."""
    min_p: float = 0
    """Minimum probability relative to the most probable token, 0 to 1. 0: off."""
    stop: Stops = []
    """At most four stop strings, each of at most 10,000 characters."""
    ignore_eos: bool = False
    """Continue after end-of-text and after the chat template's end of turn."""
    stream: bool = False
    """Send the answer as server-sent events."""
    user: Text | None = None
    """Logged with the request, up to 64 characters."""
    nvium: NviumOptions = NviumOptions()


class ConversationRequest(AnswerRequest):
    """Fields of chats and responses."""

    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer. By default, `auto` allows several and `required` one: small models repeat
    required calls without end."""
    safety_identifier: Text | None = None
    """Logged with the request instead of `user`."""
    prompt_cache_key: Text | None = None
    """No effect, because all requests share the prefix cache."""
    prompt_cache_options: Annotated[Any, Unsupported({}, {"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[Any, Unsupported("in_memory")] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    moderation: Annotated[Any, Unsupported()] = None


class GenerationRequest(AnswerRequest):
    """Fields of completions and chat: OpenAI's and those of other servers."""

    n: int = 1
    """Number of choices for each prompt, at most `--max-n`. Choice j samples with `seed` and j."""
    presence_penalty: float = 0
    """−2 to 2, subtracted from the logits of tokens generated so far. 0: off."""
    frequency_penalty: float = 0
    """−2 to 2, subtracted once for each occurrence. 0: off."""
    repetition_penalty: float = 1
    """0.01 to 2, applied to all tokens so far including the prompt. 1: off."""
    logit_bias: Annotated[dict[str, float], MaxItems(1024)] = {}
    """Biases added to logits, −100 to 100 by token id."""
    stop_token_ids: Annotated[list[int], MaxItems(1024)] = []
    """Token ids that end the answer, in addition to end-of-text."""
    min_tokens: int = 0
    """Minimum number of tokens. Until then, stop tokens are not sampled, and stop strings are ignored."""
    include_stop_str_in_output: bool = False
    """Include the matched stop string in the text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """An alternative to `response_format`."""
    cache_salt: Annotated[str, Field(min_length=1), AfterValidator(encodable)] | None = None
    """Share cached prefixes only with requests that have the same salt."""
    metadata: Metadata | None = None
    """Up to 16 pairs. Keys have up to 64 characters, values up to 512. Returned with the answer or its last chunk."""

    stream_options: StreamOptions | None = None
    """Requires `stream`."""
    return_token_ids: bool = False
    """Return `prompt_token_ids`, and `token_ids` of each choice."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else [*dict.fromkeys(self.stop)]

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    @abstractmethod
    def requested_max_tokens(self) -> int | None:
        """Return the requested `max_tokens`, or None for the rest of the context."""

    @property
    def request_names(self) -> dict[str, str]:
        return {"threshold": "nvium.threshold"}

    def output_format(self) -> OutputFormat | None:
        """Return the format of the answer, if any. Raise `InvalidField` if fields contradict each other."""
        formats = [self.response_format.output_format()] if self.response_format else []
        formats += [self.structured_outputs.output_format()] if self.structured_outputs else []
        requested = [each for each in formats if each is not None]
        for other in requested[1:]:
            require(other.grammar == requested[0].grammar, other.param, f"cannot be combined with {requested[0].param}")
        return requested[0] if requested else None

    @property
    def logged_user(self) -> str | None:
        return None if self.user is None else loggable(self.user)

    @contextmanager
    def in_request_names(self) -> Iterator[None]:
        """In the engine's errors, replace the engine's field names with the names that this request used."""
        try:
            yield
        except InvalidRequest as error:
            error.field = self.name_of(error.field)
            raise

    def sampling(self, defaults: Mapping[str, Any], also_stops_at: Sequence[int], **more: Any) -> SamplingParams:
        """Return the engine's sampling parameters, with the model's `defaults` for fields that the request leaves out.

        Raise `InvalidRequest` for a value out of range.
        """
        given = {name: getattr(self, name) for name in SHARED_PARAMS & self.model_fields_set}
        given |= {name: getattr(self.nvium, name) for name in PARAMS & NviumOptions.model_fields.keys()}
        given |= {"logit_bias": self._logit_bias(), "stop_token_ids": (*self.stop_token_ids, *also_stops_at)}
        if self.top_k == NO_LIMIT:
            given["top_k"] = 0
        return SamplingParams(**with_defaults(given | more, defaults))

    def check(self, limits: ServerOptions) -> None:
        """Raise `InvalidField` if a field is out of range or not supported."""
        check_unsupported(self)
        is_few = 1 <= self.n <= limits.max_n
        require(is_few, "n", f"must be between 1 and {limits.max_n}, got {self.n}", code=OUT_OF_RANGE)
        require(self.stream or self.stream_options is None, "stream_options", "only allowed when stream is true")
        message = "must be 0 for constrained output, which ends where its constraint ends"
        require(self.min_tokens == 0 or self.output_format() is None, "min_tokens", message)

    def _logit_bias(self) -> dict[Any, float]:
        """Return biases by token id. Malformed keys stay strings, so that the engine's error names all wrong keys."""
        biases = self.logit_bias.items()
        return {int(key) if re.fullmatch("0|[1-9][0-9]{0,9}", key) else key: bias for key, bias in biases}


SHARED_PARAMS = PARAMS & GenerationRequest.model_fields.keys()


def loggable(name: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in name[:64])


class TokenExits(TypedDict):
    """Arrays with one entry per token.

    `exits` count from 1. `exit_layers` are their depths in layer calls. `text_offsets` count characters of the choice's
    text. `exit_probabilities` are p_k of the token's exit, `probabilities` are p_k of all exits.
    """

    token_ids: list[int]
    exits: list[int]
    exit_layers: list[int]
    exit_probabilities: list[float]
    text_offsets: NotRequired[list[int]]
    probabilities: NotRequired[list[list[float]]]


class ExitSummary(TypedDict):
    """The number of tokens per exit over all choices, and the mean depth as a fraction of the last exit's."""

    exit_counts: list[int]
    mean_depth: float


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class PromptTokenIds(TypedDict, total=False):
    prompt_token_ids: list[int]


class GeneratedChoice(TypedDict):
    """A choice in a response or a chunk."""

    index: int
    finish_reason: AnswerEnd | None
    token_ids: NotRequired[list[int]]
    nvium: NotRequired[TokenExits]


class Generated(TypedDict):
    """A response or a chunk. Bodies with tokens are `TypedDict`s, which are cheaper to create and to serialize."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    metadata: NotRequired[dict[str, str]]
    nvium: NotRequired[ExitSummary]
