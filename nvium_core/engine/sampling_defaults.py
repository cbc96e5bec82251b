"""A model's own defaults of sampling parameters, from its generation_config.json or GGUF file."""

from collections.abc import Mapping
from typing import Any

from nvium_core.choices import GenerationDefaults
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.validation import InvalidRequest
from nvium_core.model.nvium import Nvium

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: Nvium, choice: GenerationDefaults = "auto") -> dict[str, Any]:
    """Return the model's own sampling parameters; none if `choice` is off.

    Raise `InvalidRequest` for a value out of range.
    """
    found = {name: getattr(model.generation_config, name, None) for name in NAMES}
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
