"""The configuration of a model with exits added, and the layers of the exits."""

from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError

from nvium_core.errors import NviumError
from nvium_core.model.config import NviumConfig


class RetrofitError(NviumError, ValueError):
    """The model or the settings of a retrofit are unusable."""


def with_exits(config: NviumConfig, layers: Sequence[int], adapter_hidden_size: int | None = None) -> NviumConfig:
    """Add exits to a configuration. Adapters are as wide as the model by default.

    Raise `RetrofitError` if the layers are invalid.
    """
    added = {"exit_layers": list(layers), "adapter_hidden_size": adapter_hidden_size}
    try:
        return NviumConfig.from_dict(config.to_dict() | added)
    except (ValueError, StrictDataclassError) as error:
        raise RetrofitError(str(error.__cause__ or error)) from error


def exit_layers(text: str, num_layers: int) -> list[int]:
    """Parse the number of exits or a list of layers such as `12,18,24`. Return the exits' layers, the last included.

    Raise `RetrofitError` if the model cannot have these exits.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RetrofitError(f"exits must be a number, or layers such as 12,18,24; got {text!r}") from error
    if "," not in text:
        if not 2 <= numbers[0] <= num_layers:
            raise RetrofitError(f"the number of exits must be in [2, {num_layers}], got {text}")
        return [round(number * num_layers / numbers[0]) for number in range(1, numbers[0] + 1)]
    if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= num_layers:
        raise RetrofitError(f"the layers of exits must be in [1, {num_layers}] and increase, got {text}")
    return numbers if numbers[-1] == num_layers else [*numbers, num_layers]
