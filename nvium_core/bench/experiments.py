"""The experiments by name. Only the chosen one is imported.

An experiment is a module with `measure(subject, …)`, whose keyword arguments are its options, and `table(figures)`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nvium_core.engine.params import require

if TYPE_CHECKING:
    from rich.table import Table

    from nvium_core.bench.harness import Figures, Subject

Experiment = Literal[
    "schedules",
    "throughput",
    "memory",
    "prefix",
    "chunking",
    "logprobs",
    "determinism",
    "costs",
    "heads",
    "peers",
    "prompts",
    "profile",
    "host",
    "threads",
    "drafts",
    "lookup",
    "exits",
    "sampling",
]

Given = Mapping[str, Any]
"""Options by name; the experiment has defaults for the others."""


def check(
    experiment: Experiment,
    given: Given,
    json_file: Path | None = None,
    plot: Path | None = None,
    *,
    several: bool = False,
) -> None:
    """Raise `InvalidRequest`, naming the option, before anything is measured. `several`: more than one model is
    measured."""
    known = inspect.signature(_module(experiment).measure).parameters
    for option, value in given.items():
        require(option in known, option, f"means nothing to {experiment}")
        require(not isinstance(value, int) or value >= 1, option, f"must be at least 1, got {value}")
        require(not isinstance(value, float) or value > 0, option, f"must be above 0, got {value}")
    for option, file in {"json": json_file, "plot": plot}.items():
        require(file is None or file.parent.is_dir(), option, f"no such folder: {file and file.parent}")
    if plot:
        require(experiment in _plots(several), "plot", f"there is nothing to draw of {experiment}")
        require(plot.suffix == ".png", "plot", f"must be a .png, got {plot.name}")
        has_one = 1 in given.get("sequences", (1,))
        require(has_one or not several, "sequences", "must have 1 among them, which is what is drawn of several shapes")


def measure(experiment: Experiment, subject: "Subject", given: Given) -> "Figures":
    """Experiment, model, machine and results, for JSON."""
    return {"experiment": experiment, **subject.as_dict(), **_module(experiment).measure(subject, **given)}


def table(figures: "Figures") -> "Table":
    """The main figures."""
    shown: Table = _module(figures["experiment"]).table(figures)
    shown.title = figures["model"]
    return shown


def save(runs: Sequence["Figures"], json_file: Path | None = None, plot: Path | None = None) -> None:
    """Write JSON and plot where asked; several runs become a list and one plot."""
    several = len(runs) > 1
    figures = runs if several else runs[0]
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if plot:
        _plots(several)[runs[0]["experiment"]](figures).savefig(plot)


def _module(experiment: str) -> Any:
    return import_module(f"nvium_core.bench.{experiment}")


def _plots(several: bool) -> Mapping[str, Callable[..., Any]]:
    module = import_module("nvium_core.bench.plots")
    plots: Mapping[str, Callable[..., Any]] = module.PLOTS_BY_SHAPE if several else module.PLOTS
    return plots
