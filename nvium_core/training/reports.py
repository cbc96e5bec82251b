"""A run's reports: log.jsonl, a progress bar, lines without a terminal."""

import json
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from nvium_core.training.errors import TrainingError
from nvium_core.training.interruption import Interruption

WIDE, BAR_WIDTH = 110, 20
"""Columns of a terminal with room for a bar, and of the bar."""

LINE_SECONDS = 30
"""Between lines without a terminal."""

Report = dict[str, Any]
"""One step's figures by name: numbers, or lists with a number for each exit."""


class RunLog:
    """A run's log.jsonl, a line for each step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Continue the log after `first_step` steps; later lines of an interrupted run are dropped."""
        self.path = folder / "log.jsonl"
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
        with suppress(OSError):  # every line has been flushed, or has failed before
            self.file.close()

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


class Followed(Protocol):
    """A run whose steps are shown."""

    step: int

    @property
    def num_steps(self) -> int: ...
    def steps(self) -> Generator[Report, None, None]: ...
    def save(self) -> None: ...


def follow(run: Followed, console: Console, agreed: Callable[[bool], bool] = bool) -> None:
    """Train to the end with a progress bar, or occasional lines without a terminal.

    After SIGINT or SIGTERM, of which all processes are `agreed`, writes a checkpoint and raises `KeyboardInterrupt`.
    """
    with progress_bar(console) as bar, Interruption() as interruption, closing(run.steps()) as steps:
        task = bar.add_task("", total=run.num_steps, completed=run.step)
        lines = Lines(console, run.num_steps)
        for report in steps:
            bar.update(task, completed=run.step, description=describe(report))
            if bar.disable:
                lines.tell(run.step, report)
            if agreed(interruption.is_requested):
                run.save()
                console.print(f"stopped after step {run.step}; the same command goes on", highlight=False)
                raise KeyboardInterrupt


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
