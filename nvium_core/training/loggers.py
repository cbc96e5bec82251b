"""Write a run's metrics to log.jsonl, and to TensorBoard or Weights & Biases. Neither has to be installed."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from nvium_core.training.errors import TrainingError

LOG = "log.jsonl"  # in a run's folder
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""Names of `--logger`, and the modules that they need."""

Report = dict[str, Any]
"""A step's metrics by name. Values are numbers, lists with one number per exit, or texts."""


class Logger(Protocol):
    def write(self, report: Report) -> None: ...
    def close(self) -> None: ...


class RunLog:
    """A run's log.jsonl, with one line per step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open the log and drop its lines after `first_step`: a resumed run repeats the steps after its checkpoint."""
        self.path = folder / LOG
        partial = folder / "log.partial"
        try:
            partial.write_text("".join(lines_up_to(self.path, first_step)), encoding="utf-8")
            partial.replace(self.path)
            self.file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self.failure(error) from error

    def write(self, report: Report) -> None:
        try:
            self.file.write(json.dumps(report) + "\n")
            self.file.flush()
        except OSError as error:
            raise self.failure(error) from error

    def close(self) -> None:
        with suppress(OSError):  # `write` has flushed every line and raised its errors
            self.file.close()

    def failure(self, error: OSError) -> TrainingError:
        return TrainingError(f"{self.path}: cannot write the log ({error}); the last checkpoint is intact")


def lines_up_to(log: Path, step: int) -> list[str]:
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if 0 < step_of(line) <= step]


def read_log(folder: Path) -> list[Report]:
    """Return the complete lines of the log in a run's folder. Raise `TrainingError` if there are none."""
    log = folder / LOG
    reports = [json.loads(line) for line in lines_up_to(log, sys.maxsize)]
    if not reports:
        raise TrainingError(f"{log}: no such log, or it has no steps yet")
    return reports


def step_of(line: str) -> int:
    """Return the step of a log line, or 0 if the line is incomplete."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


class TensorBoard:
    """Writes event files to FOLDER/tensorboard. A resumed run hides later events."""

    def __init__(self, folder: Path, first_step: int) -> None:
        purged = first_step + 1 if first_step else None
        self.writer = module_of("tensorboard").SummaryWriter(folder / "tensorboard", purge_step=purged)
        self.close = self.writer.close

    def write(self, report: Report) -> None:
        for name, value in by_name(report).items():
            add = self.writer.add_text if isinstance(value, str) else self.writer.add_scalar
            add(name, value, report["step"])


class WandB:
    """Writes to the project nvium of Weights & Biases. A resumed run continues."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.run = module_of("wandb").init(project="nvium", name=folder.name, dir=folder, resume="auto")
        self.close = self.run.finish

    def write(self, report: Report) -> None:
        self.run.log(by_name(report), step=report["step"])


KINDS: dict[str, Callable[[Path, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB}


def module_of(name: str) -> Any:
    """Import the module of a logger. Raise `TrainingError` if it is unknown or not installed."""
    if name not in MODULES:
        raise TrainingError(f"--logger {name}: must be one of {', '.join(MODULES)}")
    try:
        return import_module(MODULES[name])
    except ImportError as error:
        raise TrainingError(f"--logger {name}: {error}; install it with pip install 'nvium[loggers]'") from error


def by_name(report: Report) -> dict[str, float | str]:
    """Return the report's numbers and texts by name. An exit's number is NAME/EXIT, from 1."""
    lists = {name: values for name, values in report.items() if isinstance(values, list)}
    exits = {f"{name}/{exit_}": number for name, values in lists.items() for exit_, number in enumerate(values, 1)}
    return {name: value for name, value in report.items() if name not in {"step", *lists}} | exits
