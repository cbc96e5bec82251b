"""Sampling parameters and engine configuration, checked before anything is allocated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

from typing_extensions import Doc

from nvium_core.choices import Instructions, Sampling, Schedule
from nvium_core.engine.constraint import Constraint
from nvium_core.errors import NviumError


class InvalidRequest(NviumError, ValueError):
    """A request that cannot be served as asked; `field` names the offending part."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens together are longer than the model's context."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, context: int) -> None:
        super().__init__(
            "prompt" if num_prompt_tokens >= context else "max_tokens",
            f"This model's maximum context length is {context} tokens. However, {num_prompt_tokens + max_tokens} were "
            f"asked for: {num_prompt_tokens} of the prompt and {max_tokens} more.",
        )


MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for with each token's log-probability."""

MAX_CHOICES = 1024
MAX_BIASES = 1024

WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "choice", "n", "best_of", "logprobs")
OPTIONAL = ("seed", "best_of", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
RANGES = (
    ("temperature", 0, 2),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 2),
)


class Kind(IntEnum):
    """How a front's token is decided.

    `EXITS`: an exit is taken as its router says, and the token drawn from f(π_k). `ARGMAX`: the argmax of Σ p_k g(π_k),
    at the first exit behind which no later one can change it. `MIXTURE`: drawn from f(π_mix) at the last exit. `RACE`:
    drawn from f(π_N) by a race, so that drafts can be verified; the argmax at temperature 0.
    """

    EXITS, ARGMAX, MIXTURE, RACE = range(4)


class Draw(NamedTuple):
    """How tokens are drawn from logits. `is_adjusted`: penalties, biases, a minimal length or a constraint change them
    first."""

    kind: Kind
    temperature: float
    log_min_p: float
    top_k: int
    top_p: float
    is_adjusted: bool

    @property
    def is_ranked(self) -> bool:
        """Top-k or top-p truncates."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What a request asks of its draws. Together all but the lengths and the numbers of choices are f, which is applied
    to the logits of the exit that emits, in this order: penalties, `logit_bias`, `min_tokens`, `constraint`;
    `temperature`; `min_p`, `top_k`, `top_p` of the mass that is left.

    `max_tokens` counts every token, end-of-text included; 0 is allowed where the prompt is scored.
    `temperature` 0 is the argmax of Σ p_k g(π_k), g being f without temperature and what comes after it.
    `top_k` 0, `top_p` 1 and `min_p` 0 truncate nothing; `min_p` drops tokens less probable than that share of the most
    probable one. `presence_penalty` and `frequency_penalty` are taken off the logits of tokens generated so far, once
    or per occurrence; `repetition_penalty` divides positive and multiplies negative logits of all tokens so far, those
    of the prompt included. `logit_bias` is added by token id.
    `min_tokens` must come before an end. `stop_token_ids` end a sequence as end-of-text does, which `ignore_eos`
    disables. `constraint` says which tokens may come next, and ends a sequence when none may. `seed` None draws one at
    random; `choice` is the number of the first alternative, and each has draws of its own. `n` alternatives are wanted,
    the best of `best_of` (None: n) by mean log π_mix.
    `sampling` "mixture" applies f to the explicit π_mix, so every token passes every exit; "original" to π_N alone,
    whose argmax is then temperature 0's token, while exits only draft; None is the model's default.
    Without `early_exits` every token passes all blocks at once; it is the same token.
    `logprobs`: log π_mix ("original": log π_N) before f of every token, with that many alternatives with it;
    `prompt_logprobs`: of the prompt's tokens too. `probabilities`: p_k of every exit with each token.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    seed: int | None = None
    choice: int = 0
    n: int = 1
    best_of: int | None = None
    sampling: Sampling | None = None
    early_exits: bool = True
    logprobs: int | None = None
    prompt_logprobs: bool = False
    probabilities: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_lengths()
        self._check_distribution()
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit in 64 bits")
        require(0 <= self.choice < 2**31, "choice", f"must be between 0 and 2³¹ − 1, got {self.choice}")
        require(self.n >= 1, "n", f"must be at least 1, got {self.n}")
        require(self.num_choices >= self.n, "best_of", f"must be at least n ({self.n}), got {self.best_of}")
        name = "n" if self.best_of is None else "best_of"
        require(self.num_choices <= MAX_CHOICES, name, f"must be at most {MAX_CHOICES}, got {self.num_choices}")
        is_known = self.sampling is None or self.sampling in get_args(Sampling)
        require(is_known, "sampling", f"must be {', '.join(get_args(Sampling))}, got {self.sampling!r}")
        in_range = self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS
        require(in_range, "logprobs", f"must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}")
        need = "must come with logprobs, which says how many alternatives to give"
        require(self.logprobs is not None or not self.prompt_logprobs, "prompt_logprobs", need)

    def _check_kinds(self) -> None:
        for name in WHOLE:
            value = getattr(self, name)
            is_left_out = value is None and name in OPTIONAL
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            require(is_left_out or is_whole, name, f"must be a whole number, got {value!r}")
        for name in NUMBERS:
            value = getattr(self, name)
            require(isinstance(value, int | float), name, f"must be a number, got {value!r}")

    def _check_lengths(self) -> None:
        least = 0 if self.prompt_logprobs else 1
        require(self.max_tokens >= least, "max_tokens", f"must be at least {least}, got {self.max_tokens}")
        require(self.max_tokens > 0 or self.num_choices == 1, "n", "must be 1 where no tokens are asked for")
        require(self.min_tokens >= 0, "min_tokens", f"must not be negative, got {self.min_tokens}")
        fits = self.min_tokens <= self.max_tokens
        require(fits, "min_tokens", f"{self.min_tokens} is more than max_tokens, which is {self.max_tokens}")
        contradiction = "cannot be asked of a constrained answer, which ends where its constraint does"
        require(self.min_tokens == 0 or self.constraint is None, "min_tokens", contradiction)

    def _check_distribution(self) -> None:
        for name, lowest, highest in RANGES:
            value = getattr(self, name)
            require(lowest <= value <= highest, name, f"must be between {lowest} and {highest}, got {value}")
        require(0 <= self.top_k < 2**31, "top_k", f"must be between 0 (off) and 2³¹ − 1, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must be above 0 and at most 1, got {self.top_p}")
        num_biases = len(self.logit_bias)
        require(num_biases <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES} tokens, got {num_biases}")
        for token_id, bias in self.logit_bias.items():
            require(-100 <= bias <= 100, "logit_bias", f"must be between -100 and 100, got {bias} for token {token_id}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def kind(self) -> Kind:
        if self.sampling == "original":
            return Kind.RACE
        if self.sampling == "mixture":
            return Kind.MIXTURE
        return Kind.ARGMAX if self.is_greedy else Kind.EXITS

    @property
    def draw(self) -> Draw:
        """The most probable token of the mixture is the first of its truncation to one."""
        kind = self.kind
        takes_first = kind is Kind.MIXTURE and self.is_greedy
        return Draw(
            kind=kind,
            temperature=1.0 if takes_first or kind is Kind.ARGMAX else self.temperature,
            log_min_p=math.log(self.min_p) if self.min_p and not takes_first else -math.inf,
            top_k=1 if takes_first else self.top_k,
            top_p=self.top_p,
            is_adjusted=self.constraint is not None or self._changes_logits,
        )

    @property
    def _changes_logits(self) -> bool:
        is_penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(is_penalised or self.logit_bias or self.min_tokens)

    @property
    def num_choices(self) -> int:
        """Alternatives to generate, of which `n` are wanted."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_scores(self) -> bool:
        """Log-probabilities or those of all exits are asked for, or choices are ranked."""
        return self.logprobs is not None or self.probabilities or self.num_choices > self.n


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine may use; each field is an option of `nvium serve` too (`nvium_core.options`).

    While sequences with few rows run, long runs (prompts) may take only `chunk_rows` of a Step. The key/value cache
    holds `cache_tokens` positions, or as many as fit into `cache_memory` of the device. With neither: room for every
    sequence's full context, within `DEFAULT_CACHE_MEMORY`.
    """

    schedule: Annotated[Schedule, Doc("race measures whole and sweep, and runs the faster.")] = "race"
    deterministic: Annotated[bool, Doc("Bit-identical answers, whatever else runs.")] = False
    context: Annotated[int | None, Doc("Maximum tokens of prompt and answer together [the model's].")] = None
    max_sequences: Annotated[int, Doc("Maximum sequences that run at once; the rest wait.")] = 32
    max_rows_per_step: Annotated[int | None, Doc("Maximum token positions per Step [256; 8192 on CUDA].")] = None
    chunk_rows: Annotated[
        int | None, Doc("Maximum prompt positions per Step while others generate [64; 2048 on CUDA].")
    ] = None
    sampling: Annotated[
        Sampling | None, Doc("Default distribution of requests without nvium.sampling [the model's default].")
    ] = None
    max_drafts: Annotated[int | None, Doc("Tokens drafted by prompt lookup; 0 disables drafts [as measured].")] = None
    max_wait_steps: Annotated[int, Doc("Steps a sequence may be passed over before it is scheduled first.")] = 64
    cache_memory: Annotated[str | None, Doc("KV cache size, such as 2GiB or 10% [as needed, at most 25%].")] = None
    cache_tokens: Annotated[int | None, Doc("KV cache size in tokens, instead of --cache-memory.")] = None
    page_size: Annotated[int | None, Doc("Tokens per cache page [16; 256 in half precision on CUDA].")] = None
    prefix_caching: Annotated[bool, Doc("Cache full pages for later prompts with the same prefix.")] = True
    instructions: Annotated[Instructions, Doc("CPU vector instructions; auto is the widest supported.")] = "auto"
    threads: Annotated[str, Doc("CPU threads; auto is PyTorch's choice.")] = "auto"
    calibrations: Annotated[Path | None, Doc("Folder for the race's measurements [in the user's cache].")] = None

    def __post_init__(self) -> None:
        require(self.schedule in get_args(Schedule), "schedule", f"no such schedule: {self.schedule!r}")
        known = self.instructions in get_args(Instructions)
        require(known, "instructions", f"must be {', '.join(get_args(Instructions))}, got {self.instructions!r}")
        thread_count(self.threads)
        is_known = self.sampling is None or self.sampling in get_args(Sampling)
        require(is_known, "sampling", f"must be {', '.join(get_args(Sampling))}, got {self.sampling!r}")
        drafts = self.max_drafts
        require(drafts is None or 0 <= drafts <= MAX_DRAFTS, "max_drafts", f"must be 0 to {MAX_DRAFTS}, got {drafts}")
        for name in ("max_sequences", "max_rows_per_step", "chunk_rows", "max_wait_steps", "page_size", "cache_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be at least 1, got {value}")
        require(self.max_sequences <= MAX_SEQUENCES, "max_sequences", f"must be at most {MAX_SEQUENCES}")
        both = self.cache_tokens is not None and self.cache_memory is not None
        require(not both, "cache_memory", "contradicts cache_tokens; give one of them")

    def row_bounds(self, device: str = "cpu") -> "RowBounds":
        """On this type of device."""
        default = ROW_BOUNDS.get(device, ROW_BOUNDS["cpu"])
        return RowBounds(self.max_rows_per_step or default.step, self.chunk_rows or default.chunk)


class RowBounds(NamedTuple):
    """Rows of a Step, and of prompts in a Step while others generate."""

    step: int
    chunk: int


ROW_BOUNDS = {"cpu": RowBounds(256, 64), "cuda": RowBounds(8192, 2048)}


MAX_SEQUENCES = 65_536

MAX_DRAFTS = 16

DEFAULT_CACHE_MEMORY = "25%"
"""Default upper bound."""


def thread_count(text: str) -> int | None:
    """Parse the option `threads`; None is auto."""
    if text == "auto":
        return None
    require(text.isdecimal() and int(text) > 0, "threads", f"must be auto or at least 1, got {text!r}")
    return int(text)


def require(condition: bool, field: str, message: str) -> None:
    """Raise `InvalidRequest` naming the field unless the condition holds."""
    if not condition:
        raise InvalidRequest(field, message)
