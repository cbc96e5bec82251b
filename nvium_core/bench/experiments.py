"""The experiments of `nvium bench`. Only the module of the named experiment is imported.

It has the functions `measure(subject, …)`, whose keyword arguments are the options, and `table(figures)`.
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

Experiment = Literal["peers", "schedules", "profile"]


def checked(experiment: Experiment, given: Mapping[str, Any], json_file: Path | None) -> Any:
    """Return the module. Raise `InvalidRequest` for an unknown option or an invalid value, before a model is loaded."""
    module = import_module(f"nvium_core.bench.{experiment}")
    known = inspect.signature(module.measure).parameters
    for option, value in given.items():
        require(option in known, option, f"not an option of the experiment {experiment}")
        require(not isinstance(value, int) or value >= 1, option, f"must be at least 1, got {value}")
        require(not isinstance(value, float) or value > 0, option, f"must be above 0, got {value}")
    check_place(json_file)
    return module


def show(figures: "Figures", shown: "Table", console: "Console") -> None:
    """Print the results: sentences first, then a table. No line is cut, whatever the console's width."""
    shown.title = figures["model"]
    caption, shown.caption = shown.caption, None
    for column in shown.columns:
        column.overflow = "fold"
    for sentence in [*warnings(figures), *([caption] if caption else [])]:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    console.print(shown)
