import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.train import train
from research.baselines.calm import CalmForCausalLM
from tests.training.small_runs import options, small_recipe, start


def calm_recipe() -> Recipe:
    names = "model=research.baselines.calm.model", "objective=research.baselines.calm.objective"
    return small_recipe("shape.num_layers=4", "shape.num_exits=4", "tokens_per_step=512", "total_tokens=6144", *names)


def report_of(folder: Path, step: int) -> dict[str, float]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[step - 1])


def test_an_interrupted_run_ends_as_an_uninterrupted_one_in_a_folder_that_loads(tmp_path):
    recipe = calm_recipe()
    whole = train(recipe, options(tmp_path / "whole"))
    steps = start(recipe, options(tmp_path / "parts")).steps()
    for _ in range(6):
        next(steps)
    torch.manual_seed(99)
    parts = train(recipe, options(tmp_path / "parts"))
    loaded, expected = CalmForCausalLM.from_pretrained(parts), CalmForCausalLM.from_pretrained(whole).state_dict()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(parts).eos_token_id == loaded.config.eos_token_id
    first, last = report_of(tmp_path / "parts", 1), report_of(tmp_path / "parts", 12)
    assert last["mix_loss"] < first["mix_loss"]
