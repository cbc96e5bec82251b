"""A run's reports: log.jsonl, TensorBoard, a progress bar."""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from nvium_core.training.errors import TrainingError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WIDE, BAR_WIDTH = 110, 20
"""Columns of a terminal with room for a bar, and of the bar."""

LINE_SECONDS = 30
"""Between lines without a terminal."""

Report = dict[str, Any]
"""One step's figures by name: numbers, or lists with a number for each exit."""


class RunLog:
    """A run's log.jsonl, a line for each step, and TensorBoard's files on request."""

    def __init__(self, folder: Path, first_step: int, with_tensorboard: bool = False) -> None:
        """Continue the log after `first_step` steps; later lines of an interrupted run are dropped."""
        self.path = folder / "log.jsonl"
        self.tensorboard = tensorboard_writer(folder / "tensorboard", first_step) if with_tensorboard else None
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
        if self.tensorboard:
            write_scalars(self.tensorboard, report)

    def close(self) -> None:
        with suppress(OSError):  # every line has been flushed, or has failed before
            self.file.close()
        if self.tensorboard:
            self.tensorboard.close()

    def failure(self, error: OSError) -> TrainingError:
        return TrainingError(f"{self.path}: cannot be written ({error}); the last checkpoint is intact")


def lines_up_to(log: Path, step: int) -> list[str]:
    """Complete lines for steps up to this one."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if 0 < step_of(line) <= step]


def step_of(line: str) -> int:
    """The step of a log's line, 0 if it is incomplete."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def tensorboard_writer(folder: Path, first_step: int) -> "SummaryWriter":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError("TensorBoard is not installed: pip install 'nvium[training]'") from error
    return SummaryWriter(str(folder), purge_step=first_step + 1)


def write_scalars(writer: "SummaryWriter", report: Report) -> None:
    """Every number under its name, exit k's under name/k."""
    for name, value in report.items():
        numbers = {f"{name}/{k}": each for k, each in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        for tag, number in numbers.items():
            if tag != "step":
                writer.add_scalar(tag, number, report["step"])


def progress_bar(console: Console) -> Progress:
    """The step, the time left, as many figures as fit, and a bar if there is room."""
    columns: list[ProgressColumn] = [
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        DescriptionColumn(),
    ]
    if console.width >= WIDE:
        columns.append(BarColumn(bar_width=BAR_WIDTH))
    return Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)


class Lines:
    """Occasional lines without a progress bar: the first step, the last, and some between."""

    def __init__(self, console: Console, num_steps: int, seconds: float = LINE_SECONDS) -> None:
        self._console = console
        self._num_steps = num_steps
        self._seconds = seconds
        self._told_at = -math.inf

    def tell(self, step: int, report: Report) -> None:
        now = time.monotonic()
        if now - self._told_at >= self._seconds or step == self._num_steps:
            self._console.print(f"step {step:,}/{self._num_steps:,} · {describe(report)}", highlight=False)
            self._told_at = now


class DescriptionColumn(ProgressColumn):
    """The task's description on one line, truncated first."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def describe(report: Report) -> str:
    """One line: loss, tokens/s, and where present mean depth, β and the exits' shares in percent."""
    parts = [f"loss {report['mix_loss']:.3f}", f"{report['tokens_per_second']:,} tok/s"]
    if "mean_depth" in report:
        parts += [f"depth {report['mean_depth']:.2f}", f"β {report['beta']:.3f}"]
    if "exit_probs" in report:
        parts += [" ".join(f"{100 * p:.0f}" for p in report["exit_probs"]) + "%"]
    return " · ".join(parts)
