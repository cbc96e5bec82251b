"""The shape of a model that gets exits: the layers after which they stand, and the source's configuration with them."""

from collections.abc import Sequence
from os import PathLike

from huggingface_hub.errors import StrictDataclassError

from nvium_core.errors import NviumError
from nvium_core.model.config import NviumConfig


class RetrofitError(NviumError, ValueError):
    """A model that is no plain Llama, or exits that it cannot have."""


def require_plain(config: NviumConfig, source: str | PathLike[str]) -> None:
    """Raise `RetrofitError` for a model that has exits."""
    if config.num_exits > 1 or config.adapter_hidden_size:
        raise RetrofitError(f"{source}: has exits or an adapter already; only a plain Llama is retrofitted")


def with_exits(config: NviumConfig, layers: Sequence[int], adapter_hidden_size: int | None = None) -> NviumConfig:
    """The configuration of the same backbone with exits, their adapters as wide as the model unless another width is
    given. Raises `RetrofitError` for layers that it does not have."""
    added = {"exit_layers": list(layers), "adapter_hidden_size": adapter_hidden_size}
    try:
        return NviumConfig.from_dict(config.to_dict() | added)
    except (ValueError, StrictDataclassError) as error:
        raise RetrofitError(str(error.__cause__ or error)) from error


def exit_layers(text: str, num_layers: int) -> list[int]:
    """Layers after which there are exits, the last included: of their number, or of layers such as `12,18,24`. Raises
    `RetrofitError`."""
    try:
        given = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RetrofitError(f"exits must be a number of exits or layers such as 12,18,24, got {text!r}") from error
    if len(given) == 1 and "," not in text:
        return even_layers(given[0], num_layers)
    if given != sorted(set(given)) or not 1 <= given[0] <= given[-1] <= num_layers:
        raise RetrofitError(f"exits: layers between 1 and the model's {num_layers}, in rising order, got {text}")
    return given if given[-1] == num_layers else [*given, num_layers]


def even_layers(num_exits: int, num_layers: int) -> list[int]:
    """Layers as evenly spaced as possible."""
    if not 2 <= num_exits <= num_layers:
        raise RetrofitError(f"exits: between 2 and the model's {num_layers} layers, got {num_exits}")
    return [round(number * num_layers / num_exits) for number in range(1, num_exits + 1)]
