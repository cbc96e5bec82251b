"""Dry runs: every recipe has an estimate, and what is measured for it becomes the time of the whole run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nvium_core.training.estimate import dry_run as module
from nvium_core.training.estimate.dry_run import (
    Estimate,
    Speed,
    available_bytes,
    dry_run,
    from_scratch,
    measured_speed,
    pass_of,
    quantity,
    spoken_time,
    table,
)
from nvium_core.training.estimate.flops import training_flops
from nvium_core.training.options import RunOptions
from nvium_core.training.recipes.catalogue import RECIPES, recipe_named
from tests.training.small_runs import options, small_recipe

NOWHERE = RunOptions(data=Path("text"), folder=Path("run"))


def rendered(estimate: Estimate) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table(estimate))
    return capture.get()


@pytest.mark.parametrize("name", [each for name in RECIPES for each in (name, f"{name}-dense")])
def test_every_recipe_and_every_twin_has_an_estimate(name: str) -> None:
    recipe = recipe_named(name, [])
    estimate = dry_run(recipe, NOWHERE, flops_per_second=4e14)
    assert estimate.seconds == pytest.approx(training_flops(recipe) / 4e14)
    assert 0 < estimate.memory.weights < estimate.memory.total
    assert "tokens/s" in rendered(estimate)


def test_what_does_not_fit_is_estimated_but_for_its_time() -> None:
    estimate = dry_run(recipe_named("paper-48x1536", []), NOWHERE)
    assert estimate.memory.total > estimate.available_bytes > 0
    assert (estimate.speed, estimate.seconds) == (None, None)
    assert "does not fit" in rendered(estimate) and "--flops-per-second" in rendered(estimate)


def test_a_run_that_fits_has_its_speed_measured(tmp_path: Path) -> None:
    estimate = dry_run(small_recipe(), options(tmp_path / "run"))
    assert estimate.speed is not None and estimate.seconds is not None
    assert 1e5 < estimate.speed.flops_per_second < 1e15
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["tales", "tales-dense", "small", "tiny"])
def test_the_time_of_a_run_is_that_of_its_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "step_seconds", lambda recipe, options, rows: 0.5 + 0.001 * rows)
    recipe = recipe_named(name, ["long_context_share=0"])
    speed = measured_speed(recipe, NOWHERE)
    estimate = Estimate(recipe=recipe, each=pass_of(recipe, NOWHERE), available_bytes=1, speed=speed)
    step_seconds = 0.5 + 0.001 * recipe.tokens_per_step
    assert estimate.seconds == pytest.approx(recipe.total_tokens / recipe.tokens_per_step * step_seconds, rel=0.01)


def test_measuring_needs_neither_another_run_nor_its_log() -> None:
    for name in ("small-adaptive", "small-retrofit", "paper-sft-6x768", "paper-retrofit"):
        alone = from_scratch(recipe_named(name, []), 4096)
        assert (alone.initial, alone.beta.adaptive, alone.text, alone.num_steps) == (None, False, "documents", 100)
        assert alone.method == "nvium"


def test_a_pass_is_as_long_as_the_longest_window_and_no_larger_than_a_step() -> None:
    recipe = recipe_named("tales", [])
    assert (pass_of(recipe, NOWHERE).rows, pass_of(recipe, NOWHERE).context) == (4096, 1024)
    large = replace(recipe, tokens_per_step=2**20)
    assert pass_of(large, NOWHERE).rows == NOWHERE.rows_per_pass


def test_updating_the_weights_is_paid_once_a_step() -> None:
    recipe = recipe_named("tiny", [])
    each = pass_of(recipe, NOWHERE)
    quick, slow = (
        Estimate(recipe=recipe, each=each, available_bytes=1, speed=Speed(flops_per_second=1e9, update_seconds=seconds))
        for seconds in (0.0, 2.0)
    )
    assert slow.seconds == pytest.approx((quick.seconds or 0) + 2.0 * recipe.num_steps)


def test_free_memory_is_known() -> None:
    assert 2**20 < available_bytes(torch.device("cpu")) < 2**60


def test_pages_of_files_are_memory_that_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:  50 kB\nHugePages_Total:  0\n")
    monkeypatch.setattr(module, "MEMORY_FILE", told)
    assert available_bytes(torch.device("cpu")) == 50 * 1024


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (999, "999 "), (1234, "1.23 k"), (999_600, "1 M"), (3.1e20, "310 E"), (1e25, "1e+04 Z")],
)
def test_quantities_have_three_digits_and_a_prefix(number: float, text: str) -> None:
    assert quantity(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (61, "1 min"), (3599, "1 h 0 min"), (90_000, "25 h 0 min")]
)
def test_times_are_said_in_hours_and_minutes(seconds: float, text: str) -> None:
    assert spoken_time(seconds) == text
