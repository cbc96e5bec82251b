"""The settings of a retrofit, and their validation against the base's configuration."""

from collections.abc import Sequence

from huggingface_hub.errors import StrictDataclassError

from nvium_core.model.config import NviumConfig
from nvium_core.training.errors import TrainingError
from nvium_core.training.initial import check_head
from nvium_core.training.options import RetrofitSettings


def checked_config(settings: RetrofitSettings, config: NviumConfig) -> NviumConfig:
    """Return the base's configuration with exits. Raise `TrainingError` if the settings are invalid."""
    if config.num_loops > 1:
        raise TrainingError(f"{settings.source}: is a looped model, which cannot be retrofitted; pass a plain Llama")
    check_head(settings.source, config)
    if config.num_exits > 1 or config.adapter_hidden_size:
        raise TrainingError(f"{settings.source}: already has exits or an adapter; pass a plain Llama")
    if settings.data and not settings.data.exists():
        raise TrainingError(f"{settings.data}: no such file")
    added = with_exits(config, exit_layers(settings.exits, config.num_hidden_layers), 2 * config.hidden_size)
    added.default_sampling = "original"
    shallowest = (added.exit_layers or [])[0] / added.num_hidden_layers
    if not shallowest < settings.depth < 1:
        raise TrainingError(
            f"depth must be in ({shallowest:.3g}, 1), above the depth of the first exit, got {settings.depth}"
        )
    if settings.tokens < 1 or (settings.self_talk or 0) < 0:
        raise TrainingError("tokens must be at least 1, and self_talk must not be negative")
    if settings.exits_learn == "text" and not settings.data:
        raise TrainingError("exits_learn=text requires a text; pass --data")
    if not settings.data and not settings.self_talk_tokens:
        raise TrainingError("self_talk: must be at least 1 without --data")
    return added


def with_exits(config: NviumConfig, layers: Sequence[int], adapter_hidden_size: int | None = None) -> NviumConfig:
    """Add exits, with adapters as wide as the model by default. Raise `TrainingError` if the layers are invalid."""
    added = {"exit_layers": list(layers), "adapter_hidden_size": adapter_hidden_size}
    try:
        return NviumConfig.from_dict(config.to_dict() | added)
    except (ValueError, StrictDataclassError) as error:
        raise TrainingError(str(error.__cause__ or error)) from error


def exit_layers(text: str, num_layers: int) -> list[int]:
    """Parse a number of exits, or layers such as `12,18,24`. Raise `TrainingError` if the model cannot have them."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise TrainingError(f"exits must be a number, or layers such as 12,18,24; got {text!r}") from error
    if "," not in text:
        if not 2 <= numbers[0] <= num_layers:
            raise TrainingError(f"the number of exits must be in [2, {num_layers}], got {text}")
        return [round(number * num_layers / numbers[0]) for number in range(1, numbers[0] + 1)]
    if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= num_layers:
        raise TrainingError(f"the layers of exits must be in [1, {num_layers}] and increase, got {text}")
    return numbers if numbers[-1] == num_layers else [*numbers, num_layers]
