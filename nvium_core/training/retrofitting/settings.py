"""What a retrofit is asked for, checked against the source's configuration before any text is read."""

from dataclasses import dataclass
from pathlib import Path

from nvium_core.choices import Lesson
from nvium_core.model.config import NviumConfig
from nvium_core.training.retrofitting.shape import RetrofitError, exit_layers, require_plain, with_exits

NUM_EXITS = 4
EPOCHS = 3
"""Over what the model says to itself, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """`exits` is their number, the last included, or the layers of the early ones, such as `12,18,24`; `depth` is the
    mean depth l / L that routers are steered to. `self_talk` is how many tokens the model writes itself to learn from:
    by default none with `data`, and a third of `tokens` without. `exits_learn`: once routers learn too, early exits
    learn the original's distribution, or the text."""

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
        """The configuration with exits. Raises `RetrofitError` for what cannot be had."""
        require_plain(config, self.source)
        if self.data and not self.data.exists():
            raise RetrofitError(f"{self.data}: no such text")
        added = with_exits(config, exit_layers(self.exits, config.num_hidden_layers), 2 * config.hidden_size)
        added.default_sampling = "original"
        shallowest = (added.exit_layers or [])[0] / added.num_hidden_layers
        if not shallowest < self.depth < 1:
            raise RetrofitError(f"depth must be between {shallowest:.3g}, that of the first exit, and 1")
        if self.exits_learn == "text" and not self.data:
            raise RetrofitError("exits learn a text that is given: without data they learn the original's distribution")
        if not self.data and not self.self_talk_tokens:
            raise RetrofitError("without data, self_talk must be at least 1")
        return added

    @property
    def self_talk_tokens(self) -> int:
        if self.self_talk is not None:
            return self.self_talk
        return 0 if self.data else max(1, self.tokens // EPOCHS)
