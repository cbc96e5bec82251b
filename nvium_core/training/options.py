"""The options of `nvium train` other than the recipe, and of `nvium retrofit`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from nvium_core.choices import ExitTarget
from nvium_core.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how a recipe is trained. Fields with a `Doc` are command-line options."""

    data: Path
    folder: Path
    device: str = "cpu"
    compile: bool = False
    validation: Annotated[Path | None, Doc("Held-out text for periodic evaluation.")] = None
    rows_per_pass: Annotated[int, Doc("Maximum tokens per forward pass; limits memory.")] = 16_384
    logger: Annotated[str, Doc("Where to log besides log.jsonl: tensorboard, wandb or tensorboard,wandb.")] = ""

    def __post_init__(self) -> None:
        if self.rows_per_pass < 1:
            raise TrainingError(f"rows_per_pass must be at least 1, got {self.rows_per_pass}")

    @property
    def loggers(self) -> list[str]:
        return [name.strip() for name in self.logger.split(",") if name.strip()]


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """The settings of a retrofit. Fields with a `Doc` are command-line options."""

    source: str
    target: Path
    data: Annotated[
        Path | None,
        Doc("Text in a format that `nvium train` reads, or a .jsonl of conversations [text that the model generates]."),
    ] = None
    self_talk: Annotated[
        int | None, Doc("Training tokens that the model generates itself [without --data a third of --tokens].")
    ] = None
    exits: Annotated[str, Doc("Number of exits, or their layers, such as 12,18,24.")] = "4"
    tokens: Annotated[int, Doc("Number of training tokens; a shorter text is repeated.")] = 1_000_000
    depth: Annotated[float, Doc("Mean depth that the routers are trained for, as a share of all layers.")] = 0.9
    exits_learn: Annotated[
        ExitTarget,
        Doc("Training target of early exits: the base's distribution (original), or also --data (text)."),
    ] = "original"
    seed: int = 0

    @property
    def self_talk_tokens(self) -> int:
        if self.self_talk is not None:
            return self.self_talk
        return 0 if self.data else max(1, self.tokens // 3)  # three epochs
