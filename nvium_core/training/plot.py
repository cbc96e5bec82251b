"""Draws the log of a run: losses, exit shares and mean depth over the steps."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from nvium_core.training.errors import TrainingError
from nvium_core.training.loggers import Report, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (12, 3.6)
PANELS = {
    "loss, nats per token": {"mix_loss": "mixture", "validation_loss": "validation", "exit_losses": "exit"},
    "share of the tokens": {"exit_probs": "exit"},
    "mean depth, share of the layers": {"mean_depth": ""},
}
"""Panels by title: the labels of the curves by field of the log. A field with a number per exit has several curves."""


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
