from pathlib import Path

import pytest
from rich.console import Console

from nvium_core.training import dry_run as module
from nvium_core.training.dry_run import Estimate, dry_run, pass_rows, table, training_flops
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.catalogue import RECIPES, recipe_named
from tests.training.small_runs import options, small_recipe

NOWHERE = RunOptions(data=Path("text"), folder=Path("run"))


def rendered(estimate: Estimate) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table(estimate))
    return capture.get()


def test_every_recipe_and_every_twin_has_an_estimate():
    for name in [*RECIPES, *(f"{recipe}-dense" for recipe in RECIPES)]:
        recipe = recipe_named(name, [])
        estimate = dry_run(recipe, NOWHERE, flops_per_second=4e14)
        assert estimate.seconds == pytest.approx(training_flops(recipe) / 4e14), name
        assert "tokens/s" in rendered(estimate) and "per parameter" in rendered(estimate), name


def test_a_dry_run_measures_time_and_memory_and_writes_nothing(tmp_path):
    estimate = dry_run(small_recipe(), options(tmp_path / "run"))
    assert estimate.seconds > 0 and estimate.peak_bytes and 2**20 < estimate.peak_bytes < 2**40
    assert "in one pass" in rendered(estimate)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_time_of_a_run_is_the_sum_of_its_passes(monkeypatch):
    monkeypatch.setattr(module, "timed_step", lambda run: 0.5)
    recipe = recipe_named("tiny", [])
    assert dry_run(recipe, NOWHERE).seconds == pytest.approx(recipe.total_tokens / pass_rows(recipe, NOWHERE) * 0.5)
