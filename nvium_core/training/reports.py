"""Shows the progress of a run: a progress bar or log lines on standard error."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from nvium_core.training.loggers import Report
from nvium_core.training.loop import TrainingLoop

WIDE, BAR_WIDTH = 110, 20  # width from which a terminal shows a bar, and the bar's width
LINE_SECONDS = 30  # interval between log lines when standard error is not a terminal


def follow(run: TrainingLoop, console: Console) -> None:
    """Train to the end with a progress bar, or with occasional log lines if the console is not a terminal.

    After SIGINT or SIGTERM, write a checkpoint and raise `KeyboardInterrupt`.
    """
    with progress_bar(console) as bar, interruption() as is_interrupted, closing(run.steps()) as steps:
        task = bar.add_task("", total=run.num_steps, completed=run.step)
        last_line = -math.inf
        if run.step:
            console.print(f"resuming after step {run.step:,} of {run.num_steps:,}", highlight=False)
        for report in steps:
            bar.update(task, completed=run.step, description=describe(report))
            if advice := run.advice(report):
                console.print(advice, highlight=False, markup=False, soft_wrap=True)
            now = time.monotonic()
            if bar.disable and (now - last_line >= LINE_SECONDS or run.step == run.num_steps):
                left = timedelta(seconds=round(bar.tasks[0].time_remaining or 0))
                line = f"step {run.step:,}/{run.num_steps:,} · {describe(report)}"
                console.print(f"{line} · {left} left" if left else line, highlight=False, soft_wrap=True)
                last_line = now
            if is_interrupted():
                run.save()
                console.print(f"stopped after step {run.step}; run the same command to resume", highlight=False)
                raise KeyboardInterrupt


def note(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM was received. A second signal has its usual effect."""
    received: list[int] = []
    with ExitStack() as handlers:

        def receive(number: int, _frame: object) -> None:
            received.append(number)
            handlers.close()

        for number in (signal.SIGINT, signal.SIGTERM):
            handlers.callback(signal.signal, number, signal.signal(number, receive))
        yield lambda: bool(received)


def progress_bar(console: Console) -> Progress:
    """Return a progress display with the step, the time left and the metrics. On a wide terminal, it has a bar."""
    columns: list[ProgressColumn] = [
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
        DescriptionColumn(),
    ]
    if console.width >= WIDE:
        columns.append(BarColumn(bar_width=BAR_WIDTH))
    return Progress(*columns, console=console, disable=not console.is_terminal)


class DescriptionColumn(ProgressColumn):
    """The task's description, truncated if the terminal is too narrow."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def describe(report: Report) -> str:
    """Format loss, tokens/s and, if reported, mean depth, β and each exit's share of tokens in percent."""
    parts = [f"loss {report['mix_loss']:.3f}", f"{report['tokens_per_second']:,} tok/s"]
    if "mean_depth" in report:
        parts += [f"depth {report['mean_depth']:.2f}", f"β {report['beta']:.3f}"]
    if "exit_probs" in report:
        parts += [" ".join(f"{100 * p:.0f}" for p in report["exit_probs"]) + "%"]
    return " · ".join(parts)
