"""Send a run's metrics to TensorBoard or Weights & Biases as well. Neither has to be installed."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from nvium_core.training.errors import TrainingError

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""Names of `--logger`, and the modules that they need."""


class Logger(Protocol):
    """A destination of reports."""

    def write(self, report: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes event files to FOLDER/tensorboard. A resumed run hides later events."""

    def __init__(self, folder: Path, first_step: int) -> None:
        purged = first_step + 1 if first_step else None
        self.writer = module_of("tensorboard").SummaryWriter(folder / "tensorboard", purge_step=purged)
        self.close = self.writer.close

    def write(self, report: dict[str, Any]) -> None:
        for name, value in scalars(report).items():
            self.writer.add_scalar(name, value, report["step"])


class WandB:
    """Writes to the project nvium of Weights & Biases. A resumed run continues."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.run = module_of("wandb").init(project="nvium", name=folder.name, dir=folder, resume="auto")
        self.close = self.run.finish

    def write(self, report: dict[str, Any]) -> None:
        self.run.log(scalars(report), step=report["step"])


KINDS: dict[str, Callable[[Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def module_of(name: str) -> Any:
    """Import the module of a logger. Raise `TrainingError` if it is unknown or not installed."""
    if name not in MODULES:
        raise TrainingError(f"--logger {name}: must be one of {', '.join(MODULES)}")
    try:
        return import_module(MODULES[name])
    except ImportError as error:
        raise TrainingError(f"--logger {name}: {error}; install it with pip install 'nvium[loggers]'") from error


def scalars(report: dict[str, Any]) -> dict[str, float]:
    """Return the report's numbers by name. An exit's number is NAME/EXIT, from 1."""
    lists = {name: value if isinstance(value, list) else None for name, value in report.items() if name != "step"}
    return {
        f"{name}/{exit_}" if values else name: number
        for name, values in lists.items()
        for exit_, number in enumerate(values or [report[name]], 1)
    }
