"""Whole runs of the baselines: they resume exactly, whatever is drawn, and leave folders of their own kind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from nvium_core.training.baselines.calm import CalmForCausalLM
from nvium_core.training.objective.methods import METHODS
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Method, Recipe
from nvium_core.training.train import train
from tests.training.small_runs import options, small_recipe, start

KINDS: list[tuple[Method, type[PreTrainedModel]]] = [("calm", CalmForCausalLM), ("layerskip", LlamaForCausalLM)]


def recipe_of(method: Method) -> Recipe:
    """Twelve steps of four layers and four exits."""
    return replace(small_recipe("shape.num_layers=4", "shape.num_exits=4", "tokens_per_step=512"), method=method)


def report_of(folder: Path, step: int) -> dict[str, float]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[step - 1])


@pytest.mark.parametrize(("method", "kind"), KINDS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one_in_a_folder_that_loads(
    method: Method, kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    recipe = replace(recipe_of(method), total_tokens=12 * 512)
    whole = train(recipe, options(tmp_path / "whole"))
    steps = start(recipe, options(tmp_path / "parts")).steps()
    for _ in range(6):
        next(steps)
    torch.manual_seed(99)
    parts = train(recipe, options(tmp_path / "parts"))
    weights, expected = kind.from_pretrained(parts).state_dict(), kind.from_pretrained(whole).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(parts).eos_token_id == kind.from_pretrained(parts).config.eos_token_id
    first, last = report_of(tmp_path / "parts", 1), report_of(tmp_path / "parts", 12)
    assert last["mix_loss"] < first["mix_loss"]
    assert first.get("dropped_share", 0) == 0 and last.get("dropped_share", 1) > 0


@pytest.mark.parametrize(("method", "kind"), KINDS)
def test_the_size_of_a_pass_changes_nothing_but_rounding(
    method: Method, kind: type[PreTrainedModel], tmp_path: Path
) -> None:
    losses = []
    for rows_per_pass in (8 * 64, 3 * 64):
        run = start(recipe_of(method), options(tmp_path / str(rows_per_pass), rows_per_pass=rows_per_pass))
        run.step = 9
        losses.append(run.train_step(run.batches_of(9)))
    assert losses[0]["mix_loss"] == pytest.approx(losses[1]["mix_loss"], abs=2e-4)
    assert losses[0].get("dropped_share") == losses[1].get("dropped_share")


@pytest.mark.parametrize("name", ["small-calm", "small-layerskip"])
def test_models_have_as_many_parameters_as_their_recipe_says(name: str) -> None:
    recipe = recipe_named(name, [])
    model = METHODS[recipe.method].build(recipe, recipe.shape.vocab_size, 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(recipe)
