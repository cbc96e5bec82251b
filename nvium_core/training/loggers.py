"""A run's metrics: log.jsonl, a figure of it, TensorBoard and Weights & Biases. Their packages are optional."""

import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvium_core.errors import TrainingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG = "log.jsonl"  # in a run's folder
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""Names of `--logger`, and the modules that they need."""

Report = dict[str, Any]
"""A step's metrics by name. Values are numbers, lists with one number per exit, or texts."""

SIZE_INCHES = (12, 3.6)
PANELS = {
    "loss, nats per token": {"mix_loss": "mixture", "validation_loss": "validation", "exit_losses": "exit"},
    "share of the tokens": {"exit_probs": "exit"},
    "mean depth, share of the layers": {"mean_depth": ""},
}
"""Panels by title: the labels of the curves by field of the log. A field with a number per exit has several curves."""


class RunLog:
    """A run's log.jsonl, with one line per step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open the log and drop its lines after `first_step`: a resumed run repeats the steps after its checkpoint."""
        self.path = folder / LOG
        partial = folder / "log.partial"
        try:
            kept = (report for report in complete_reports(self.path) if report["step"] <= first_step)
            partial.write_text("".join(f"{json.dumps(report)}\n" for report in kept), encoding="utf-8")
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


def read_log(folder: Path) -> list[Report]:
    """Return the complete lines of the log in a run's folder. Raise `TrainingError` if there are none."""
    reports = complete_reports(folder / LOG)
    if not reports:
        raise TrainingError(f"{folder / LOG}: no such log, or it has no steps yet")
    return reports


def complete_reports(log: Path) -> list[Report]:
    """Parse a log, without the incomplete line of a run that was killed. Return nothing if there is no log."""
    reports = list[Report]()
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        with suppress(ValueError, TypeError):
            if "step" in (report := json.loads(line)):
                reports.append(report)
    return reports


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


KINDS: dict[str, type[TensorBoard | WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


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


def plot(folder: Path, file: Path) -> None:
    """Draw the log in a run's folder. The file's suffix decides its format. Raise `TrainingError` if it cannot."""
    reports = read_log(folder)
    try:
        figure = import_module("matplotlib.figure").Figure(SIZE_INCHES, layout="constrained")
    except ImportError as error:
        raise TrainingError(f"nvium plot: {error}; install it with pip install 'nvium[research]'") from error
    figure.suptitle(folder.name)
    for panel, (title, curves) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        draw(panel, title, curves, reports)
    try:
        figure.savefig(file)
    except ValueError as error:  # matplotlib's for an unknown suffix
        raise TrainingError(f"{file}: {error}") from error


def draw(panel: "Axes", title: str, curves: dict[str, str], reports: list[Report]) -> None:
    for field, label in curves.items():
        points = [(report["step"], report[field]) for report in reports if field in report]
        if points:
            steps, values = zip(*points, strict=True)
            has_exits = isinstance(values[0], list)
            labels = [f"{label} {exit_}" for exit_ in range(1, len(values[0]) + 1)] if has_exits else label
            marker, color = "" if len(points) == len(reports) else ".", None if has_exits else "black"
            panel.plot(steps, values, label=labels, linewidth=1, marker=marker, color=color)
    panel.set_xlabel("step")
    panel.set_title(title, fontsize="medium")
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")
