"""Sampling parameters of a request, checked when they are made, and how a token is drawn with them.

The C++ of exit rules, temperature, truncation and random numbers is device/native/draw.h. A random number depends only
on what it decides, not on the time or the batch. The numbers come from Philox4x64-10 (Salmon et al. 2011), keyed by
seed and choice: block (position + 1, exit, 0, 0) has the numbers for drawing a token and for routing.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from numbers import Real
from typing import NamedTuple, get_args

import numpy as np

from nvium_core.choices import Sampling
from nvium_core.engine.constraint import Constraint
from nvium_core.engine.errors import require, require_between, require_threshold

MAX_LOGPROBS, MAX_CHOICES, MAX_BIASES, MAX_INTEGER = 20, 1024, 1024, 2**31 - 1
LEAST_TEMPERATURE = 1e-30
"""Lower temperatures, which float32 would round to 0, mean the same: all weights but the largest are 0."""

RANGES = (
    ("temperature", 0, 2),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 2),
)

POSITIONS_AHEAD = 64


class ExitRule(IntEnum):
    """When a front row stops, and what its token is sampled from.

    `EXITS`: the routers choose exit k, and the token is sampled from f(π_k). `ARGMAX`: the token is the argmax of
    Σ p_k g(π_k), emitted at the first exit after which no later exit can change it. `MIXTURE`: the token is sampled
    from f(π_mix) at the last exit. `ORIGINAL`: the token is sampled from f(π_N) by an exponential race, which can
    verify drafts. `THRESHOLD`: the row stops at the first exit k with 1 − Π_{j≤k} (1 − w_j) ≥ `threshold`, and the
    token is sampled from f(π_k). `CONFIDENCE` (CALM): it stops at the first exit where max π_k > `threshold`.
    `ORIGINAL`, `THRESHOLD` and `CONFIDENCE` take the argmax at temperature 0. Only `EXITS` and `MIXTURE` are exact
    samples of the mixture. Rules before `ORIGINAL` are scored by the mixture, the others by the exit that they choose.
    """

    EXITS, ARGMAX, MIXTURE, ORIGINAL, THRESHOLD, CONFIDENCE = range(6)


RULES = {rule.name.lower(): rule for rule in ExitRule if rule != ExitRule.ARGMAX}
"""Rules by `SamplingParams.sampling`. "confidence" is not public: research compares with it."""

THRESHOLD_RULES = frozenset({ExitRule.THRESHOLD, ExitRule.CONFIDENCE})
"""Rules that need a threshold."""

UNSCORED_RULES = frozenset({ExitRule.CONFIDENCE})
"""Rules without log-probabilities."""

HEAD_RULES = frozenset({ExitRule.ARGMAX, ExitRule.CONFIDENCE})
"""Rules that need the logits of every exit that a row passes."""


class Draw(NamedTuple):
    """How a token is sampled from logits. The fields and their order are those of `Draw` in native/draw.h.

    A log min-p of -inf, a top-k of 0 and a top-p of 1 disable the truncation. A threshold above 1 is never reached.
    """

    rule: int = ExitRule.EXITS
    threshold: float = math.inf
    temperature: float = 1.0
    log_min_p: float = -math.inf
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_ranked(self) -> bool:
        """Whether top-k or top-p truncates, which requires sorting."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


DRAW = np.dtype([(name, np.float64 if kind is float else np.int64) for name, kind in Draw.__annotations__.items()])
"""`Draw` as a record of 8-byte words."""


class Uniforms:
    """The random numbers of one sequence, which are generated for `POSITIONS_AHEAD` positions at once."""

    def __init__(self, seed: int, choice: int, num_exits: int) -> None:
        self._key = np.array([seed % 2**64, choice], np.uint64)
        self._num_exits = num_exits
        self._first = -1
        self._rows: list[bytes] = []

    def at(self, position: int) -> bytes:
        """Return numbers in [0, 1) of a position, float64 [2, N]: for drawing a token at each exit, and for routing."""
        first = position - position % POSITIONS_AHEAD
        if first != self._first:
            streams = [
                np.random.Philox(counter=[first, exit_, 0, 0], key=self._key) for exit_ in range(self._num_exits)
            ]
            found = [np.random.Generator(stream).random((POSITIONS_AHEAD, 4)) for stream in streams]
            used = np.stack(found, -1)[:, :2]  # one number for both purposes would correlate exit and token
            self._first, self._rows = first, [row.tobytes() for row in used]
        return self._rows[position - first]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request.

    They define f, which transforms the logits of the exit that emits. f starts with g: penalties, `logit_bias`,
    `min_tokens`, `constraint`. Then follow `temperature`, `min_p`, `top_k`, and `top_p` of the remaining mass.

    - `max_tokens`: maximum number of generated tokens, end-of-text included. It may be 0 if the prompt is scored.
    - `temperature`: 0 selects the argmax of Σ p_k g(π_k).
    - `top_k`, `top_p`, `min_p`: disabled by 0, 1 and 0 respectively. `min_p` is relative to the most probable token.
    - `presence_penalty`: subtracted from the logits of generated tokens. `frequency_penalty`: once per occurrence.
    - `repetition_penalty`: divides positive and multiplies negative logits of generated and prompt tokens.
    - `min_tokens`: number of tokens before a stop token may be generated. Not with `constraint`.
    - `stop_token_ids`: tokens that end the sequence, besides end-of-text. `ignore_eos` disables end-of-text.
    - `constraint`: restricts the next token, and ends the sequence if no token may follow.
    - `seed`: None chooses a random seed. `choice`: index of the first choice. Each choice has its own random numbers.
    - `best_of`: number of choices to generate (None: `n`). `n`: number to return, those with the best mean log π_mix.
    - `sampling`: "mixture" applies f to the explicit π_mix, so every token passes all exits. "original" applies f to
      π_N alone, and drafts tokens by prompt lookup. "threshold" applies f to π_k of the first exit k whose cumulative
      probability is at least `threshold`, which is not an exact sample of the mixture; 1 or more is the last exit. None
      is the model's default.
    - `early_exits`: False runs all blocks for every token; the tokens are the same.
    - `logprobs`: number of alternatives to return with each token's log π_mix before f ("original": log π_N,
      "threshold": log π_k of the exit that it chooses). `prompt_logprobs` scores the prompt too.
    - `probabilities`: return p_k of all exits with each token.
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
    sampling: str | None = None
    threshold: float | None = None
    early_exits: bool = True
    logprobs: int | None = None
    prompt_logprobs: bool = False
    probabilities: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_lengths()
        self._check_distribution()
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit in 64 bits")
        require(self.n >= 1, "n", f"must be at least 1, got {self.n}")
        require(self.num_choices >= self.n, "best_of", f"must be at least n ({self.n}), got {self.best_of}")
        name = "n" if self.best_of is None else "best_of"
        require(self.num_choices <= MAX_CHOICES, name, f"must be at most {MAX_CHOICES}, got {self.num_choices}")
        if self.sampling is not None:
            message = f"must be one of {', '.join(get_args(Sampling))}, got {self.sampling!r}"
            require(self.sampling in [*RULES], "sampling", message)
        if self.threshold is not None:
            require_threshold(self.threshold, "threshold")
        if self.logprobs is not None:
            require_between(self.logprobs, "logprobs", 0, MAX_LOGPROBS)
        require(self.logprobs is not None or not self.prompt_logprobs, "prompt_logprobs", "requires logprobs")

    def _check_kinds(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if each.type in (int, int | None):
                is_omitted = value is None and each.type is not int
                require(is_omitted or is_integer, each.name, f"must be an integer, got {value!r}")
            elif each.type is float:
                require(isinstance(value, int | float), each.name, f"must be a number, got {value!r}")
            elif each.name == "stop_token_ids":
                require(isinstance(value, Collection), each.name, f"must be a list, got {value!r}")
            elif each.name == "logit_bias":
                is_valid = isinstance(value, Mapping) and all(isinstance(bias, Real) for bias in value.values())
                require(is_valid, each.name, f"must map token ids to numbers, got {value!r}")

    def _check_lengths(self) -> None:
        require_between(self.max_tokens, "max_tokens", 0 if self.prompt_logprobs else 1, MAX_INTEGER)
        require(self.max_tokens > 0 or self.num_choices == 1, "n", "must be 1 if max_tokens is 0")
        require(self.min_tokens >= 0, "min_tokens", f"must not be negative, got {self.min_tokens}")
        message = f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
        require(self.min_tokens <= self.max_tokens, "min_tokens", message)
        require(self.min_tokens == 0 or self.constraint is None, "min_tokens", "must be 0 with a constraint")

    def _check_distribution(self) -> None:
        for name, lowest, highest in RANGES:
            require_between(getattr(self, name), name, lowest, highest)
        for name in ("top_k", "choice"):
            require_between(getattr(self, name), name, 0, MAX_INTEGER)
        require(0 < self.top_p <= 1, "top_p", f"must be in (0, 1], got {self.top_p}")
        num_biases = len(self.logit_bias)
        require(num_biases <= MAX_BIASES, "logit_bias", f"must have at most {MAX_BIASES} tokens, got {num_biases}")
        for token, bias in self.logit_bias.items():
            require(-100 <= bias <= 100, "logit_bias", f"must be between -100 and 100, got {bias} for token {token}")

    def draw(self, default: Sampling = "exits", threshold: float | None = None) -> Draw:
        """Return how to sample. `default` and `threshold` replace a `sampling` and a `threshold` of None.

        A mixture at temperature 0 has a top-k of 1. Raise `InvalidRequest` if the rule lacks its threshold, or if
        another rule has one.
        """
        sampling, is_greedy = self.sampling or default, self.temperature == 0
        rule = ExitRule.ARGMAX if sampling == "exits" and is_greedy else RULES[sampling]
        asked = self.threshold
        require(
            not (self.needs_scores and rule in UNSCORED_RULES), "sampling", f"{sampling!r} has no log-probabilities"
        )
        if rule in THRESHOLD_RULES:
            asked = threshold if asked is None else asked
            require(asked is not None, "threshold", f"required by sampling {sampling!r}")
        else:
            require(asked is None, "threshold", f"requires sampling 'threshold', but sampling is {sampling!r}")
        is_greedy_mixture = rule is ExitRule.MIXTURE and is_greedy
        temperature = 0.0 if is_greedy else max(self.temperature, LEAST_TEMPERATURE)
        return Draw(
            rule=rule,
            threshold=math.inf if asked is None or asked >= 1 else asked,
            temperature=1.0 if is_greedy_mixture or rule is ExitRule.ARGMAX else temperature,
            log_min_p=math.log(self.min_p) if self.min_p and not is_greedy_mixture else -math.inf,
            top_k=1 if is_greedy_mixture else self.top_k,
            top_p=self.top_p,
        )

    @property
    def is_adjusted(self) -> bool:
        has_penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(has_penalties or self.logit_bias or self.min_tokens or self.constraint is not None)

    @property
    def num_choices(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def choices(self) -> range:
        """The indices of the choices."""
        return range(self.choice, self.choice + self.num_choices)

    @property
    def needs_scores(self) -> bool:
        return self.logprobs is not None or self.probabilities or self.num_choices > self.n
