"""What a retrofit is asked for, checked against the source's configuration before any text is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nvium_core.choices import Backbone, Lesson
from nvium_core.model.config import NviumConfig
from nvium_core.training.retrofitting.shape import RetrofitError, exit_layers, require_plain, with_exits

NUM_EXITS = 4
RANK = 16
EPOCHS = 3
"""Over what the model says to itself, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """`exits` is their number, the last included, or the layers of the early ones, such as `12,18,24`; `depth` is the
    mean depth l / L that routers are led to. `self_talk` is how many tokens the model writes itself to learn from: by
    default none with `data`, and a third of `tokens` without. `exits_learn` is what early exits learn to say once
    routers learn too: what the original says, or what the text has. `rank` is of the updates of a low-rank backbone, by
    default `RANK`."""

    source: str
    target: Path
    data: Path | None = None
    self_talk: int | None = None
    exits: str = str(NUM_EXITS)
    tokens: int = 1_000_000
    depth: float = 0.9
    exits_learn: Lesson = "original"
    backbone: Backbone = "frozen"
    rank: int | None = None
    seed: int = 0

    def check(self, config: NviumConfig) -> NviumConfig:
        """The configuration with exits. Raises `RetrofitError` for what cannot be had."""
        require_plain(config, self.source)
        if self.data and not self.data.exists():
            raise RetrofitError(f"{self.data}: no such text")
        added = with_exits(config, exit_layers(self.exits, config.num_hidden_layers), 2 * config.hidden_size)
        added.default_sampling = "original" if self.backbone == "frozen" else "exits"
        added.drafter_hidden_size = 2 * config.hidden_size
        shallowest = (added.exit_layers or [])[0] / added.num_hidden_layers
        if not shallowest < self.depth < 1:
            raise RetrofitError(f"depth must be between {shallowest:.3g}, that of the first exit, and 1")
        if self.tokens < 1:
            raise RetrofitError(f"tokens must be at least 1, got {self.tokens}")
        self._check_lesson()
        self._check_backbone(config.hidden_size)
        if not self.data and not self.self_talk_tokens:
            raise RetrofitError("without data, self_talk must be at least 1")
        return added

    def _check_lesson(self) -> None:
        if self.exits_learn not in get_args(Lesson):
            raise RetrofitError(f"exits_learn must be one of {', '.join(get_args(Lesson))}, got {self.exits_learn!r}")
        if self.exits_learn == "text" and not self.data:
            raise RetrofitError("exits learn a text that is given: without data they learn what the original says")
        if self.exits_learn == "text" and self.backbone != "frozen":
            raise RetrofitError("exits learn the text on a frozen backbone alone, and this one is low-rank")

    def _check_backbone(self, width: int) -> None:
        if self.backbone not in get_args(Backbone):
            raise RetrofitError(f"backbone must be one of {', '.join(get_args(Backbone))}, got {self.backbone!r}")
        if self.rank is not None and self.backbone == "frozen":
            raise RetrofitError("rank is of the updates of a low-rank backbone, and this one is frozen")
        if self.updates_rank is not None and not 1 <= self.updates_rank <= width:
            raise RetrofitError(f"rank must be between 1 and the model's width {width}, got {self.rank}")

    @property
    def self_talk_tokens(self) -> int:
        if self.self_talk is not None:
            return self.self_talk
        return 0 if self.data else max(1, self.tokens // EPOCHS)

    @property
    def updates_rank(self) -> int | None:
        """Of the backbone's low-rank updates, None if it is frozen."""
        if self.backbone == "frozen":
            return None
        return RANK if self.rank is None else self.rank
