"""The bodies of requests and responses. Fields of responses are sent if they were set, so null is said on purpose."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, ValidationError

from nvium_core import SamplingParams
from server.errors import InvalidField

MAX_STOP_STRINGS = 4

TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class RequestBody(BaseModel):
    """Null means the default, as in OpenAI's specification. Fields nobody knows are accepted and can be named."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def unknown_fields(self) -> list[str]:
        """Names of the fields not honoured, those of nested objects with a dot."""
        names = list(self.model_extra or {})
        for name in type(self).model_fields:
            if isinstance(nested := getattr(self, name), RequestBody):
                names += [f"{name}.{unknown}" for unknown in nested.unknown_fields]
        return names


def described(message: str) -> WrapValidator:
    """One plain message in place of one for each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("described", message) from error

    return WrapValidator(validate)


def encodable(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("encodable", "must be valid Unicode") from error
    return text


Text = Annotated[str, AfterValidator(encodable)]
Prompts = Annotated[
    Text | list[Text] | list[int] | list[list[int]],
    described(
        "must be a string (valid Unicode), a list of strings, a list of token ids, or a list of lists of token ids"
    ),
]
Stops = Annotated[Text | list[Text], described("must be a string or a list of strings, valid Unicode")]


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class NviumOptions(RequestBody):
    sampling: Literal["exits", "mixture"] = "exits"
    metadata: bool = True


class CompletionRequest(RequestBody):
    NEUTRAL: ClassVar[dict[str, Any]] = {"suffix": "", "logprobs": None}
    """Fields that cannot be honoured yet, with the value that asks for nothing."""

    model: str
    prompt: Prompts
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: Stops = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    nvium: NviumOptions = NviumOptions()

    min_p: float = 0
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repetition_penalty: float = 1
    logit_bias: dict[str, float] = {}
    min_tokens: int = 0

    suffix: str = ""
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each alone; [] is one prompt without tokens."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self) -> SamplingParams:
        """What this asks of the engine. Raises `InvalidRequest`."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._logit_bias(),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=self.n,
            best_of=self.best_of,
            sampling=self.nvium.sampling,
        )

    def _logit_bias(self) -> dict[int, float]:
        """By token id; JSON's keys are text."""
        for token_id in self.logit_bias:
            is_token_id = TOKEN_ID.fullmatch(token_id) is not None
            check(is_token_id, "logit_bias", f"its keys must be token ids, got {token_id!r}")
        return {int(token_id): bias for token_id, bias in self.logit_bias.items()}

    def check(self, *, max_n: int, max_prompts: int, max_new_tokens: int) -> Self:
        """Raise `InvalidField` for what is out of bounds or cannot be honoured."""
        self._check_unsupported()
        check(1 <= self.n <= max_n, "n", f"must be between 1 and {max_n}, got {self.n}")
        num_prompts = len(self.prompts)
        check(num_prompts <= max_prompts, "prompt", f"{num_prompts} prompts are more than the {max_prompts} allowed")
        check(len(self.stops) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        check(all(self.stops), "stop", "a stop string must not be empty")
        check(self.stream or self.stream_options is None, "stream_options", "only allowed when stream is true")
        self._check_best_of(max_n)
        total = num_prompts * (self.best_of or self.n) * self.max_tokens
        message = f"prompts × choices × max_tokens is {total}, more than the {max_new_tokens} allowed"
        check(total <= max_new_tokens, "max_tokens", message)
        return self

    def _check_best_of(self, max_n: int) -> None:
        if self.best_of is not None:  # that it is not below n, the engine's parameters say
            check(self.best_of <= max_n, "best_of", f"must be at most {max_n}, got {self.best_of}")
            check(not self.stream or self.best_of == self.n, "best_of", "more than n cannot be ranked in a stream")

    def _check_unsupported(self) -> None:
        for name, neutral in self.NEUTRAL.items():
            check(getattr(self, name) == neutral, name, f"not supported yet; only {json.dumps(neutral)} is")
        options = self.stream_options or StreamOptions()
        check(not options.include_obfuscation, "stream_options.include_obfuscation", "not supported; only false is")


def check(condition: bool, param: str, message: str) -> None:
    """Raise `InvalidField` naming the parameter unless the condition holds."""
    if not condition:
        raise InvalidField(param, message)


class ResponseBody(BaseModel):
    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class TokenExits(ResponseBody):
    """Arrays aligned token by token. `exits` count from 1, `exit_layers` are depths in layers."""

    token_ids: list[int]
    exits: list[int]
    exit_layers: list[int]
    exit_probabilities: list[float]


class ExitSummary(ResponseBody):
    """Over all choices: tokens per exit, and the mean of the depths as a share of all layers."""

    exit_counts: list[int]
    mean_depth: float


class Usage(ResponseBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] = Field(default=[])
    token_ids: list[int] = Field(default=[])
    nvium: TokenExits | None = None


class Completion(ResponseBody):
    """A whole response, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    nvium: ExitSummary | None = None


class Model(ResponseBody):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nvium"
    max_model_len: int
    limits: dict[str, int]
    nvium: dict[str, Any]


class ModelList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[Model]
