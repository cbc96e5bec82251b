"""The settings of a retrofit, and their validation against the base's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from nvium_core.choices import ExitTarget
from nvium_core.errors import NviumError
from nvium_core.model.config import NviumConfig

NUM_EXITS = 4
EPOCHS = 3  # epochs over the model's own conversations if there is no other text


class RetrofitError(NviumError, ValueError):
    """The model or the settings of a retrofit are unusable."""


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """The settings of a retrofit.

    - `exits`: the number of exits including the last, or the layers of the early exits, such as `12,18,24`.
    - `depth`: the mean depth that routers are trained for, as a share of all layers.
    - `self_talk`: the number of training tokens that the model generates. The default is 0 with `data`, else a third of
      `tokens`.
    - `exits_learn`: what early exits learn once routers train: `original` means the base's distribution, and `text`
      means the base's distribution and the text.
    """

    source: str
    target: Path
    data: Path | None = None
    self_talk: int | None = None
    exits: str = str(NUM_EXITS)
    tokens: int = 1_000_000
    depth: float = 0.9
    exits_learn: ExitTarget = "original"
    seed: int = 0

    def check(self, config: NviumConfig) -> NviumConfig:
        """Return the base's configuration with exits. Raise `RetrofitError` if the settings are invalid."""
        if config.num_exits > 1 or config.adapter_hidden_size:
            raise RetrofitError(f"{self.source}: already has exits or an adapter; pass a plain Llama")
        if self.data and not self.data.exists():
            raise RetrofitError(f"{self.data}: no such file or folder")
        added = with_exits(config, exit_layers(self.exits, config.num_hidden_layers), 2 * config.hidden_size)
        added.default_sampling = "original"
        shallowest = (added.exit_layers or [])[0] / added.num_hidden_layers
        if not shallowest < self.depth < 1:
            raise RetrofitError(
                f"depth must be in ({shallowest:.3g}, 1), above the depth of the first exit, got {self.depth}"
            )
        if self.exits_learn == "text" and not self.data:
            raise RetrofitError("exits_learn=text requires a text; pass --data")
        if not self.data and not self.self_talk_tokens:
            raise RetrofitError("self_talk: must be at least 1 without --data")
        return added

    @property
    def self_talk_tokens(self) -> int:
        if self.self_talk is not None:
            return self.self_talk
        return 0 if self.data else max(1, self.tokens // EPOCHS)


def with_exits(config: NviumConfig, layers: Sequence[int], adapter_hidden_size: int | None = None) -> NviumConfig:
    """Add exits, with adapters as wide as the model by default. Raise `RetrofitError` if the layers are invalid."""
    added = {"exit_layers": list(layers), "adapter_hidden_size": adapter_hidden_size}
    try:
        return NviumConfig.from_dict(config.to_dict() | added)
    except (ValueError, StrictDataclassError) as error:
        raise RetrofitError(str(error.__cause__ or error)) from error


def exit_layers(text: str, num_layers: int) -> list[int]:
    """Parse a number of exits, or layers such as `12,18,24`. Raise `RetrofitError` if the model cannot have them."""
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
