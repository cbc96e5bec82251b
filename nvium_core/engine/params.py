"""What a request asks of the sampler and what an engine may use, checked before anything is allocated."""

from dataclasses import dataclass
from typing import get_args

from nvium_core.choices import Schedule
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
            f"this model's context is {context} tokens; the prompt has {num_prompt_tokens} and "
            f"{max_tokens} more were asked for ({num_prompt_tokens + max_tokens} in all)",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw from the exit that speaks.

    `temperature` 0 is the argmax of π_mix. `top_k` 0 and `top_p` 1 truncate nothing. `seed` None draws one at random;
    `choice` numbers the alternatives of one request, each with draws of its own. `max_tokens` counts every token,
    end-of-text included; `stop_token_ids` end a sequence like end-of-text does, which `ignore_eos` disables.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", f"must be at least 1, got {self.max_tokens}")
        require(0 <= self.temperature <= 2, "temperature", f"must be between 0 and 2, got {self.temperature}")
        require(0 <= self.top_k < 2**31, "top_k", f"must be between 0 (off) and 2³¹ − 1, got {self.top_k}")
        require(0 < self.top_p <= 1, "top_p", f"must be above 0 and at most 1, got {self.top_p}")
        require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit in 64 bits")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What an engine may use.

    `max_sequences` run at once, the rest wait. `max_rows_per_step` bounds a step, so it also chunks prompts.
    `cache_tokens` is the capacity of the key/value cache in token positions (None: room for every sequence's full
    context, but no more than `DEFAULT_CACHE_TOKENS`). `context` None is the model's own.
    """

    schedule: Schedule = "sweep"
    max_sequences: int = 32
    max_rows_per_step: int = 256
    page_size: int = 16
    cache_tokens: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        require(self.schedule in get_args(Schedule), "schedule", f"no such schedule: {self.schedule!r}")
        for field in ("max_sequences", "max_rows_per_step", "page_size"):
            require(getattr(self, field) >= 1, field, f"must be at least 1, got {getattr(self, field)}")


DEFAULT_CACHE_TOKENS = 32_768


def require(condition: bool, field: str, message: str) -> None:
    """Raise `InvalidRequest` naming the field unless the condition holds."""
    if not condition:
        raise InvalidRequest(field, message)
