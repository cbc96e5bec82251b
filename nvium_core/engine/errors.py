"""Errors of requests and options that cannot be served, with the checks that raise them, and of failed sequences."""

import math
from typing import get_args

from nvium_core.errors import NviumError, rephrase


class InvalidRequest(NviumError, ValueError):
    """A request or option that cannot be served. `field` names the invalid parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens together exceed the model's context."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, context: int) -> None:
        super().__init__(
            "prompt" if num_prompt_tokens >= context else "max_tokens",
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt_tokens + max_tokens} tokens: {num_prompt_tokens} in the prompt and {max_tokens} in the "
            "completion.",
        )


class EngineError(NviumError, RuntimeError):
    """A sequence failed."""


class DeviceLost(EngineError):
    """The device has failed, so no sequence can run any more."""


class EngineStopped(EngineError):
    """The engine was stopped before the sequence finished."""


class ConstraintLimit(EngineError):
    """The sequence's constraint exceeded its cost limits."""


class NoTokenAllowed(EngineError):
    """The sequence's constraint allows no token of the vocabulary."""


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidRequest(field, message)


def require_between(value: float, field: str, lowest: float, highest: float) -> None:
    require(lowest <= value <= highest, field, f"must be between {lowest} and {highest}, got {value}")


def require_threshold(value: object, field: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and 0 < float(str(value)) < math.inf, field, f"must be a finite number above 0, got {value!r}")


def require_choice(value: str, field: str, literal: object) -> None:
    choices = get_args(literal)
    require(value in choices, field, rephrase(f"must be one of {', '.join(choices)}, got {value!r}"))
