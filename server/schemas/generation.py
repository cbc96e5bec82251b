"""Fields of completions and chat: how to sample, when to stop, what to return."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from nvium_core import Constraint, InvalidRequest, SamplingParams
from server.generation.grammars import Without
from server.schemas.aliases import SAME
from server.schemas.body import (
    Int64,
    NeutralOnly,
    RequestBody,
    ResponseBody,
    Text,
    at_most,
    check,
    described,
)
from server.schemas.foreign import check_foreign
from server.schemas.formats import GUIDED, Choices, Form, ResponseFormat, Schema, StructuredOutputs, guided

NO_LIMIT = -1
"""As `max_tokens` and `top_k`."""

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 10_000
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_ALLOWED_TOKENS = 100_000
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
MAX_PROMPT_LOGPROBS = 20

MAX_LOGGED_CHARACTERS = 64

TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

Stops = Annotated[
    Text | Annotated[list[Text], Field(fail_fast=True)],
    described("must be a string or a list of strings, valid Unicode"),
]


def short(metadata: dict[str, str]) -> dict[str, str]:
    """Within OpenAI's bounds."""
    if any(len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT for name, text in metadata.items()):
        message = f"names may have {MAX_METADATA_NAME} characters, texts {MAX_METADATA_TEXT}"
        raise PydanticCustomError("too_long", message)
    return metadata


Metadata = Annotated[dict[Text, Text], at_most(MAX_METADATA), AfterValidator(short)]


class RequestLimits(ResponseBody):
    """Bounds on one request."""

    max_n: int
    max_prompts: int
    max_new_tokens: int


class StreamOptions(RequestBody):
    include_usage: bool = False
    """A last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Usage so far in every chunk."""
    include_obfuscation: Annotated[bool, NeutralOnly(False)] = False


class NviumOptions(RequestBody):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    sampling: Literal["exits", "mixture", "original"] | None = None
    """Sample from the exit that routers draw, from the explicit mixture, or from the last exit alone; by default what
    `--sampling` or the model says."""
    early_exits: bool = True
    """Without them every token passes all layers before the next one. It is the same token, later."""
    metadata: bool = True
    """Whether the answer has the exits of its tokens, `nvium`."""
    text_offsets: bool = False
    """Adds where each token's characters begin in the text."""
    probabilities: bool = False
    """Adds p_k of all exits; costs as much as `logprobs`."""
    open_objects: bool = False
    """Whether objects that declare `properties` may have others too unless the schema says otherwise."""


class GenerationRequest(RequestBody):
    """Fields of both endpoints: OpenAI's, those of other servers that the engine has, and `nvium`."""

    same = SAME

    model: Text
    """Its id, or `default`."""
    n: int = 1
    """Choices that share one prompt, at most `--max-n`; choice j draws from (seed, j)."""
    seed: int | None = None
    """64 bits, which decide every draw; random by default."""
    temperature: float = 1.0
    """0 to 2. 0 takes the most probable token of the mixture; with `nvium.sampling: original`, of the last exit."""
    top_p: float = 1.0
    """Above 0, at most 1; 1: off."""
    top_k: int = 0
    """0 or −1: off."""
    min_p: float = 0
    """0 to 1, a share of the most probable token's probability; 0: off."""
    presence_penalty: float = 0
    """−2 to 2, taken off the logits of tokens generated so far; 0: off."""
    frequency_penalty: float = 0
    """The same for each occurrence."""
    repetition_penalty: float = 1
    """From 0.01 to 2; of all tokens so far, the prompt's included; 1: off."""
    logit_bias: Annotated[dict[str, float], at_most(MAX_BIASES)] = {}
    """Added to the logits, by token id, −100 to 100."""

    stop: Stops = []
    """At most four strings of at most 10,000 characters."""
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKENS)] = []
    """End the answer as end-of-text does."""
    min_tokens: int = 0
    """Tokens before the text may end."""
    ignore_eos: bool = False
    """The text ends neither at end-of-text nor at the end of a turn of the chat template."""
    include_stop_str_in_output: bool = False
    """Whether the text holds the stop string that ended it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """Not with `response_format`."""
    guided_json: Schema = None
    """Another name of `structured_outputs.json`, as the next seven are of its other fields."""
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: Schema = None
    regex: Text | None = None
    grammar: Text | None = None
    ebnf: Text | None = None
    bad_words: Annotated[list[Text], at_most(MAX_BAD_WORDS)] = []
    """Texts that the answer must not contain, at most 64."""
    allowed_token_ids: Annotated[list[int], at_most(MAX_ALLOWED_TOKENS)] | None = None
    """Tokens that the answer may have; end-of-text only if it is among them."""
    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = None
    """Only this many last tokens of a prompt are used; −1: as many as leave room for the answer, `max_tokens` or 1."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
    """As `logprobs`, of the prompt's tokens, with this many alternatives; not in a stream."""
    priority: Int64 = 0
    """Of waiting requests with the same API key, the lowest number goes first."""
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    """Cached prefixes are shared only by requests with the same salt."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    metadata: Metadata | None = None
    """Up to 16 pairs of texts, of 64 and 512 characters, returned with the answer; in a stream, in its last chunk."""

    stream: bool = False
    """Whether the answer is sent as events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    return_token_ids: bool = False
    """Adds `prompt_token_ids`, and `token_ids` of each choice."""
    user: Text | None = None
    """In the request's log line, its first 64 characters."""
    nvium: NviumOptions = NviumOptions()

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else [*dict.fromkeys(self.stop)]

    @property
    def num_choices(self) -> int:
        """Alternatives to generate for each prompt."""
        return self.n

    @property
    @abstractmethod
    def asked_max_tokens(self) -> int | None:
        """None for the rest of the context."""

    def num_prompt_tokens_kept(self, context: int) -> int | None:
        """None for all of them."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, context - max(1, self.asked_max_tokens or 0))

    @property
    def own_names(self) -> dict[str, str]:
        """The names of the engine's fields by which this request gives them, where they differ."""
        return {own: name for name, own in self.other_names(self.model_extra or {}).items()}

    def form(self) -> Form | None:
        """The form of the answer, if any. Raises `InvalidField` if there are two."""
        closes = not self.nvium.open_objects
        forms = [self.response_format.form(closes=closes)] if self.response_format else []
        forms += [self.structured_outputs.form(closes=closes)] if self.structured_outputs else []
        given = {name: getattr(self, name) for name in GUIDED}
        forms += [outputs.form(closes=closes, param=name) for name, outputs in guided(given)]
        forms += [Form("bad_words", Without(self.bad_words), is_text=True)] if self.bad_words else []
        asked = [form for form in forms if form is not None]
        for form in asked[1:]:
            check(form.grammar == asked[0].grammar, form.param, f"contradicts {asked[0].param}; give one")
        return asked[0] if asked else None

    @property
    def who(self) -> str | None:
        """The client's user, safe to log."""
        return None if self.user is None else loggable(self.user)

    @contextmanager
    def in_own_names(self) -> Iterator[None]:
        """Name this endpoint's fields in the engine's errors."""
        try:
            yield
        except InvalidRequest as error:
            error.field = self.own_names.get(error.field, error.field)
            raise

    def sampling(
        self,
        max_tokens: int,
        constraint: Constraint | None,
        *,
        also_stops_at: Sequence[int] = (),
        logprobs: int | None = None,
        scores_prompt: bool = False,
        **more: Any,
    ) -> SamplingParams:
        """As many alternatives for all tokens as any of them needs. Raises `InvalidRequest`."""
        scored = [number for number in (logprobs, self.prompt_logprobs) if number is not None]
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=0 if self.top_k == NO_LIMIT else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._logit_bias(),
            min_tokens=self.min_tokens,
            stop_token_ids=(*self.stop_token_ids, *also_stops_at),
            constraint=constraint,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=self.n,
            sampling=self.nvium.sampling,
            early_exits=self.nvium.early_exits,
            probabilities=self.nvium.probabilities,
            logprobs=max(scored, default=None),
            prompt_logprobs=scores_prompt or self.prompt_logprobs is not None,
            **more,
        )

    def check(self, limits: RequestLimits) -> None:
        """Raise `InvalidField` for a field that is out of bounds or not supported."""
        self.check_neutral()
        check_foreign(self.model_extra or {})
        check(1 <= self.n <= limits.max_n, "n", f"must be between 1 and {limits.max_n}, got {self.n}")
        check(len(self.stops) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        check(all(self.stops), "stop", "a stop string must not be empty")
        longest = max(map(len, self.stops), default=0)
        message = f"a stop string may have {MAX_STOP_CHARACTERS} characters, got {longest}"
        check(longest <= MAX_STOP_CHARACTERS, "stop", message)
        check(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens", "must be at least 1, or -1")
        check(not self.stream or self.prompt_logprobs is None, "prompt_logprobs", "not available in a stream")
        check(self.stream or self.stream_options is None, "stream_options", "only allowed when stream is true")
        self.form()

    def _logit_bias(self) -> dict[int, float]:
        """By token id; JSON's keys are text."""
        for token_id in self.logit_bias:
            is_token_id = TOKEN_ID.fullmatch(token_id) is not None
            check(is_token_id, "logit_bias", f"its keys must be token ids, got {token_id!r}")
        return {int(token_id): bias for token_id, bias in self.logit_bias.items()}


def loggable(name: str) -> str:
    """Its printable characters, cut to the length of a log field."""
    return "".join(character if character.isprintable() else "?" for character in name[:MAX_LOGGED_CHARACTERS])


class TokenExits(TypedDict):
    """Arrays aligned by token. `exits` count from 1, `exit_layers` are depths in layers, `text_offsets` count
    characters from the beginning of the choice's text. `exit_probabilities` are p_k of the exit taken, `probabilities`
    those of all exits.
    """

    token_ids: list[int]
    exits: list[int]
    exit_layers: list[int]
    exit_probabilities: list[float]
    text_offsets: NotRequired[list[int]]
    probabilities: NotRequired[list[list[float]]]


class ExitSummary(TypedDict):
    """Over all choices: tokens per exit, and the mean depth as a share of all layers."""

    exit_counts: list[int]
    mean_depth: float


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptTokenIds(TypedDict, total=False):
    """Returned once per prompt, on request."""

    prompt_token_ids: list[int]


class PromptLogprob(TypedDict):
    """log π_mix, the place among all tokens (null if it is not among the alternatives), and the token's name."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token of the prompt, null for the first: the alternatives and the token itself, by id."""


class ScoredPrompt(TypedDict, total=False):
    """Of a whole answer, on request."""

    prompt_logprobs: PromptLogprobs


class GeneratedChoice(TypedDict):
    """Fields of any choice, in a response or a chunk."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    nvium: NotRequired[TokenExits]


class Generated(TypedDict):
    """Fields of any response or chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    metadata: NotRequired[dict[str, str]]
    nvium: NotRequired[ExitSummary]
