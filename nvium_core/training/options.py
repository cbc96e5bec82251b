"""How a recipe is run: the options of `nvium train` besides the recipe. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from nvium_core.choices import Sharding
from nvium_core.training.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """`data` is read, `folder` is the run's. Fields with a `Doc` are options of the command line."""

    data: Path
    folder: Path
    device: str = "cpu"
    compile: bool = False
    validation: Annotated[Path | None, Doc("Text to evaluate on now and then.")] = None
    dense_log: Annotated[Path | None, Doc("log.jsonl of a dense run, for an adaptive β.")] = None
    sharding: Annotated[Sharding, Doc("How processes share the model.")] = "ddp"
    rows_per_pass: Annotated[int, Doc("Tokens of one forward pass; bounds memory.")] = 16_384
    checkpoint_activations: Annotated[bool, Doc("Compute activations twice instead of keeping them.")] = False

    def __post_init__(self) -> None:
        if self.rows_per_pass < 1:
            raise TrainingError(f"rows_per_pass: must be at least 1, got {self.rows_per_pass}")
