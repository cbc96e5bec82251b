import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import train
from research.baselines.calm import CalmForCausalLM
from tests.training.small_runs import options, small_recipe, start

KINDS: list[tuple[str, type[PreTrainedModel]]] = [("calm", CalmForCausalLM), ("layerskip", LlamaForCausalLM)]


def recipe_of(method: str) -> Recipe:
    names = f"model=research.baselines.{method}.model", f"objective=research.baselines.{method}.objective"
    return small_recipe("shape.num_layers=4", "shape.num_exits=4", "tokens_per_step=512", "total_tokens=6144", *names)


def report_of(folder: Path, step: int) -> dict[str, float]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[step - 1])


@pytest.mark.parametrize(("method", "kind"), KINDS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one_in_a_folder_that_loads(method, kind, tmp_path):
    recipe = recipe_of(method)
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
