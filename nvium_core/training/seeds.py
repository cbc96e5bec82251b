"""Train a recipe with several seeds, and compare the runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.caveats import warnings
from nvium_core.training.loggers import Report, read_log
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note
from nvium_core.training.train import VALIDATION_LOSS, trained

FIGURES = {VALIDATION_LOSS: "validation loss", "mix_loss": "loss", "mean_depth": "mean depth", "beta": "β"}
END_SHARE = 0.1  # share of the steps, at the end of the run, over which a figure is averaged

Figures = dict[str, float]


def train_seeds(recipes: Mapping[int, Recipe], options: RunOptions) -> Table:
    """Train a recipe per seed, each in its own folder, FOLDER/seed-N. Return a table of the runs' last figures."""
    found, lines = dict[int, Figures](), list[str]()
    for seed, recipe in recipes.items():
        folder = options.folder / f"seed-{seed}"
        note(f"seed {seed}: {folder}")
        run = trained(recipe, replace(options, folder=folder))
        reports = read_log(folder)
        found[seed] = last_figures(reports)
        lines += warnings({"model": folder.name, "exit_shares": reports[-1].get("exit_probs"), **run.size})
    made = table(found)
    made.caption = "\n".join(lines)
    return made


def last_figures(reports: Sequence[Report]) -> Figures:
    """Return the last validation loss, if any, and the means of other figures over the last tenth of the steps."""
    end = reports[-max(1, round(END_SHARE * len(reports))) :]
    found = {name: fmean(report[name] for report in end) for name in FIGURES if all(name in report for report in end)}
    evaluated = [report[VALIDATION_LOSS] for report in reports if VALIDATION_LOSS in report]
    return found | ({VALIDATION_LOSS: evaluated[-1]} if evaluated else {})


def table(by_seed: dict[int, Figures]) -> Table:
    """Return a row per seed, and one of the means with the standard deviations."""
    names = [name for name in FIGURES if all(name in figures for figures in by_seed.values())]
    shown = Table("seed", *(FIGURES[name] for name in names), box=SIMPLE, padding=(0, 1, 0, 0))
    for seed, figures in by_seed.items():
        shown.add_row(str(seed), *(f"{figures[name]:.4f}" for name in names))
    values = [[figures[name] for figures in by_seed.values()] for name in names]
    shown.add_row("mean ± std", *(f"{fmean(each):.4f} ± {stdev(each):.4f}" for each in values if len(each) > 1))
    return shown
