"""Train a recipe with several seeds, and compare the runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from rich.box import SIMPLE
from rich.table import Table

from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.reports import note
from nvium_core.training.train import VALIDATION_LOSS, train

FIGURES = {VALIDATION_LOSS: "validation loss", "mix_loss": "loss", "mean_depth": "mean depth", "beta": "β"}
END_SHARE = 0.1  # share of the steps, at the end of the run, over which a figure is averaged

Figures = dict[str, float]


def train_seeds(recipe: Recipe, options: RunOptions, seeds: Sequence[int]) -> Table:
    """Train once per seed, each in its own folder, FOLDER/seed-N. Return a table of the runs' last figures."""
    found: dict[int, Figures] = {}
    for seed in seeds:
        folder = options.folder / f"seed-{seed}"
        note(f"seed {seed}: {folder}")
        train(replace(recipe, seed=seed), replace(options, folder=folder))
        found[seed] = last_figures(folder / "log.jsonl")
    return table(found)


def last_figures(log: Path) -> Figures:
    """Return the last validation loss, if any, and the means of other figures over the last tenth of the steps."""
    reports = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
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
