"""Runs an experiment of `nvium bench` by its name. Only the module of this experiment is imported.

The module has the functions `measure(subject, …)`, whose keyword arguments are the options, and `table(figures)`.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nvium_core.bench.figures import check_place
from nvium_core.engine.validation import require
from nvium_core.training.caveats import warnings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nvium_core.bench.figures import Figures
    from nvium_core.bench.harness import Subject

Experiment = Literal["peers", "schedules", "profile"]


def check(experiment: Experiment, given: Mapping[str, Any], json_file: Path | None = None) -> None:
    """Raise `InvalidRequest` for an unknown option or an invalid value. Call this before loading the model."""
    known = inspect.signature(_module(experiment).measure).parameters
    for option, value in given.items():
        require(option in known, option, f"not an option of the experiment {experiment}")
        require(not isinstance(value, int) or value >= 1, option, f"must be at least 1, got {value}")
        require(not isinstance(value, float) or value > 0, option, f"must be above 0, got {value}")
    check_place(json_file)


def measure(experiment: Experiment, subject: "Subject", given: Mapping[str, Any]) -> "Figures":
    """Run an experiment. Return its name, a description of the model, and its results, as JSON values."""
    return {"experiment": experiment, **subject.as_dict(), **_module(experiment).measure(subject, **given)}


def show(figures: "Figures", console: "Console") -> None:
    """Print the results: sentences first, then a table. No line is cut, whatever the console's width."""
    shown: Table = _module(figures["experiment"]).table(figures)
    shown.title = figures["model"]
    caption, shown.caption = shown.caption, None
    for column in shown.columns:
        column.overflow = "fold"
    for sentence in [*warnings(figures), *([caption] if caption else [])]:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    console.print(shown)


def _module(experiment: str) -> Any:
    return import_module(f"nvium_core.bench.{experiment}")
