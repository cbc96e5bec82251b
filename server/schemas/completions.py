"""`POST /v1/completions`."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from nvium_core import Constraint, SamplingParams, ServerOptions
from server.errors import OUT_OF_RANGE
from server.schemas.body import MaxItems, Text, Unsupported, described, require
from server.schemas.generation import NO_LIMIT, Generated, GeneratedChoice, GenerationRequest, PromptTokenIds
from server.schemas.json_text import MAX_VALUES

TokenIds = Annotated[list[int], MaxItems(MAX_VALUES)]
Prompts = Annotated[
    Text | Annotated[list[Text], MaxItems(MAX_VALUES)] | TokenIds | Annotated[list[TokenIds], MaxItems(MAX_VALUES)],
    described(
        "must be a string (valid Unicode), a list of strings, a list of token ids, or a list of lists of token ids"
    ),
]


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    """A string, a list of token ids, or a list of either with at most `--max-prompts` prompts."""
    max_tokens: int = 16
    """−1: the rest of the context. 0 with `echo`: only score the prompt."""
    best_of: int | None = None
    """Generate this many choices, return the `n` with the highest mean log-probability. Must equal `n` in a stream."""
    echo: bool = False
    """Prepend the prompt to the text."""
    logprobs: int | None = None
    """0 to 20. Return log π_mix (with `nvium.sampling: original` or `threshold`, log π_k of the exit) of each token and
    this many alternatives."""
    add_special_tokens: bool = True
    """Add special tokens, such as begin-of-text, to texts."""
    suffix: Annotated[str, Unsupported("", why=": the model cannot infill")] = ""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list. An empty list is one prompt without tokens."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)

    @property
    def num_choices(self) -> int:
        return self.best_of or self.n

    @property
    def requested_max_tokens(self) -> int | None:
        return None if self.max_tokens == NO_LIMIT else self.max_tokens

    def params(self, constraint: Constraint | None, max_tokens: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's sampling parameters. Raise `InvalidRequest` for a value out of range.

        An echoed prompt is scored if `logprobs` is set or nothing is generated.
        """
        scores_prompt = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        logprobs = 0 if scores_prompt and self.logprobs is None else self.logprobs
        own = {"max_tokens": max_tokens, "constraint": constraint, "best_of": self.best_of}
        return self.sampling(defaults, (), **own, logprobs=logprobs, prompt_logprobs=scores_prompt)

    def check(self, limits: ServerOptions) -> None:
        super().check(limits)
        num_prompts = len(self.prompts)
        allowed = limits.max_prompts
        require(num_prompts <= allowed, "prompt", f"must have at most {allowed} prompts, got {num_prompts}")
        if self.best_of is not None:  # `SamplingParams` checks that `best_of` is at least `n`
            message = f"must be at most {limits.max_n}, got {self.best_of}"
            require(self.best_of <= limits.max_n, "best_of", message, code=OUT_OF_RANGE)
            require(not self.stream or self.best_of == self.n, "best_of", "must equal n when stream is true")


class CompletionLogprobs(TypedDict):
    """Arrays with one entry per token. A prompt's first token has null scores. `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: Iterable[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(GeneratedChoice, PromptTokenIds):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
