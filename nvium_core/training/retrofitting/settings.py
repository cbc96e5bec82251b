"""The settings of a retrofit, and their validation against the base's configuration."""

from dataclasses import dataclass
from pathlib import Path

from nvium_core.choices import Lesson
from nvium_core.model.config import NviumConfig
from nvium_core.training.retrofitting.shape import RetrofitError, exit_layers, with_exits

NUM_EXITS = 4
EPOCHS = 3
"""Epochs over the model's own conversations if there is no other text."""


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """The settings of a retrofit.

    - `exits`: the number of exits, the last included, or the early exits' layers, such as `12,18,24`.
    - `depth`: the mean depth l / L that routers are trained for.
    - `self_talk`: tokens that the model generates to train on; by default none with `data`, else a third of `tokens`.
    - `exits_learn`: what early exits learn once routers train too: the base's distribution, or the text as well.
    """

    source: str
    target: Path
    data: Path | None = None
    self_talk: int | None = None
    exits: str = str(NUM_EXITS)
    tokens: int = 1_000_000
    depth: float = 0.9
    exits_learn: Lesson = "original"
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
            raise RetrofitError("self_talk must be at least 1 without --data")
        return added

    @property
    def self_talk_tokens(self) -> int:
        if self.self_talk is not None:
            return self.self_talk
        return 0 if self.data else max(1, self.tokens // EPOCHS)
