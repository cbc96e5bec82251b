"""Checks requests on arrival, so that every admitted request can be completed, and has a model's defaults."""

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from nvium_core.choices import GenerationDefaults, Sampling
from nvium_core.engine.errors import ContextLengthExceeded, InvalidRequest, require
from nvium_core.engine.sampling_params import Draw, SamplingParams
from nvium_core.model.nvium import Nvium

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine. `context` is in tokens; `end_token_ids` are its end-of-text tokens.

    `sampling` and `exit_threshold` apply to requests that do not set `sampling` and `threshold`.
    """

    context: int
    vocab_size: int
    end_token_ids: frozenset[int]
    sampling: Sampling
    exit_threshold: float | None

    def check(self, token_ids: Items[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest` if a request can never be served."""
        require(len(token_ids) > 0, "prompt", "must have at least one token")
        self.draw(params)
        if len(token_ids) + params.max_tokens > self.context:
            raise ContextLengthExceeded(len(token_ids), params.max_tokens, self.context)
        self._check_vocabulary("prompt", token_ids)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        can_emit = params.min_tokens == 0 or len(self.stops(params)) < self.vocab_size
        require(can_emit, "min_tokens", "must be 0 if every token is a stop token")
        has_work = params.max_tokens > 0 or len(token_ids) > 1
        require(has_work, "max_tokens", "must be at least 1 for a prompt of one token, which has nothing to score")

    def draw(self, params: SamplingParams) -> Draw:
        """Return how to sample a request with these parameters. Raise `InvalidRequest` as `SamplingParams.draw`."""
        return params.draw(self.sampling, self.exit_threshold)

    def stops(self, params: SamplingParams) -> frozenset[int]:
        """Return all tokens that end a request with these parameters."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_token_ids)

    def _check_vocabulary(self, field: str, token_ids: Iterable[Any]) -> None:
        with suppress(TypeError, ValueError, OverflowError):
            id_T = np.frombuffer(array("q", token_ids), np.int64)  # faster than a check of each id
            if not len(id_T) or (id_T.min() >= 0 and id_T.max() < self.vocab_size):
                return
        wrong = [each for each in token_ids if not (isinstance(each, Integral) and 0 <= int(each) < self.vocab_size)]
        named = ", ".join(map(repr, wrong[:8]))
        require(not wrong, field, f"must be token ids in [0, {self.vocab_size}), got {named}")


def eos_token_ids(model: Nvium) -> frozenset[int]:
    """Return the end-of-text tokens of the generation configuration, or, if it has none, of the model configuration."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return frozenset([found] if isinstance(found, int) else found or ())


def sampling_defaults(model: Nvium, choice: GenerationDefaults = "auto") -> dict[str, Any]:
    """Return the model's own sampling parameters; none if `choice` is off.

    Raise `InvalidRequest` for a value out of range.
    """
    found = {name: getattr(model.generation_config, name, None) for name in DEFAULTS}
    given = {name: value for name, value in found.items() if value is not None and choice == "auto"}
    if isinstance(top_k := given.get("top_k"), int | float):
        given["top_k"] = max(0, round(top_k))  # -1 means all tokens, like 0
    try:
        SamplingParams(**given)
    except InvalidRequest as error:
        message = f"{error.message}, in the model's generation config; --generation-config off ignores it"
        raise InvalidRequest(error.field, message) from error
    return given


def with_defaults(sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sampling) if sampling.get("sampling") == "original" else {**defaults, **sampling}
