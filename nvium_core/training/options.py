"""The options of `nvium train` other than the recipe. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from nvium_core.choices import Sharding
from nvium_core.training.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how a recipe is trained. Fields with a `Doc` are command-line options."""

    data: Path
    folder: Path
    device: str = "cpu"
    compile: bool = False
    validation: Annotated[Path | None, Doc("Held-out text for periodic evaluation.")] = None
    dense_log: Annotated[Path | None, Doc("log.jsonl of a dense run, for an adaptive β.")] = None
    sharding: Annotated[Sharding, Doc("How several processes hold the model.")] = "ddp"
    rows_per_pass: Annotated[int, Doc("Maximum tokens per forward pass; limits memory.")] = 16_384
    logger: Annotated[str, Doc("Where to log besides log.jsonl: tensorboard, wandb or tensorboard,wandb.")] = ""
    checkpoint_activations: Annotated[bool, Doc("Recompute activations in the backward pass to save memory.")] = False

    def __post_init__(self) -> None:
        if self.rows_per_pass < 1:
            raise TrainingError(f"rows_per_pass must be at least 1, got {self.rows_per_pass}")

    @property
    def loggers(self) -> list[str]:
        return [name.strip() for name in self.logger.split(",") if name.strip()]
