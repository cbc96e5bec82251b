import json

import torch
from transformers import AutoTokenizer

from nvium_core.training.train import train
from research.baselines.calm import CalmForCausalLM
from tests.training.small_runs import advance, options, small_recipe, start

CALM = "model=research.baselines.calm.model", "objective=research.baselines.calm.objective"


def test_an_interrupted_run_ends_as_an_uninterrupted_one_in_a_folder_that_loads(tmp_path):
    recipe = small_recipe("shape.num_layers=4", "shape.num_exits=4", "tokens_per_step=512", "total_tokens=6144", *CALM)
    whole = train(recipe, options(tmp_path / "whole"))
    advance(start(recipe, options(tmp_path / "parts")), 6)
    torch.manual_seed(99)
    parts = train(recipe, options(tmp_path / "parts"))
    loaded, expected = CalmForCausalLM.from_pretrained(parts), CalmForCausalLM.from_pretrained(whole).state_dict()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(parts).eos_token_id == loaded.config.eos_token_id
    reports = [json.loads(line) for line in (tmp_path / "parts/log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert reports[11]["mix_loss"] < reports[0]["mix_loss"]
