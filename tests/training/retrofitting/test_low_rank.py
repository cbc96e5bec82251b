"""A backbone with low-rank updates: the teacher stays the original, and what is trained is what is stored."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from nvium_core import NviumForCausalLM, load_model
from nvium_core.cli import app
from nvium_core.loading import source_tokenizer
from nvium_core.training.retrofitting import retrofit as command
from nvium_core.training.retrofitting import run as module
from nvium_core.training.retrofitting.low_rank import SCALE, LowRankUpdates
from nvium_core.training.retrofitting.settings import RetrofitSettings
from tests.random_models import random_model
from tests.training.retrofitting.test_retrofit import IDS

OPTIONS = ["--exits", "1,3", "--backbone", "low-rank"]


def test_a_merged_product_and_its_gradients_are_those_of_low_rank_factors_beside_it() -> None:
    backbone, source = (random_model([2], dtype=torch.float32).model.requires_grad_(False) for _ in range(2))
    backbone.load_state_dict(source.state_dict())
    updates = LowRankUpdates(backbone, source, 3, torch.float32)
    for b in updates.b:
        nn.init.normal_(b, std=0.1)
    updates.merge()
    last = updates.updates()[-1]
    x, wanted = torch.randn(7, last.a_rI.shape[1]), torch.randn(7, len(last.b_Or))
    beside = F.linear(x, last.source_OI) + SCALE * x @ last.a_rI.T @ last.b_Or.T
    torch.testing.assert_close(F.linear(x, last.weight_OI), beside)
    expected = torch.autograd.grad(F.mse_loss(beside, wanted), (last.a_rI, last.b_Or))
    for _ in range(2):
        F.mse_loss(F.linear(x, last.weight_OI), wanted).backward()
        updates.take_gradients()
    for found, each in zip((last.a_rI.grad, last.b_Or.grad), expected, strict=True):
        torch.testing.assert_close(found, 2 * each)
    assert last.weight_OI.grad is None and updates.a[0].grad is None


@pytest.fixture
def trained(llama: Path, data: Path, tmp_path: Path, few_tokens_a_step: None) -> module.RetrofitRun:
    asked = RetrofitSettings(
        source=str(llama), target=tmp_path, data=data, exits="1,3", tokens=12 * 1024, depth=0.8, backbone="low-rank"
    )
    config, tokenizer = asked.check(command.source_config(llama)), source_tokenizer(str(llama))
    run, _ = command.prepared(asked, llama, config, tokenizer)
    batch = run.stream.batch(0, 1, run.context)
    before = run.model.rows(batch)
    assert torch.equal(before.original_RD, before.last_RD)
    run.folder.mkdir()
    assert len(list(run.steps())) == run.num_steps
    after = run.model.rows(batch)
    assert torch.equal(after.original_RD, before.original_RD)
    assert not torch.equal(after.last_RD, before.last_RD)
    return run


@torch.no_grad()
def test_the_original_goes_on_teaching_and_what_is_stored_is_source_and_updates(
    trained: module.RetrofitRun, llama: Path
) -> None:
    assert trained.model.updates
    original, stored = NviumForCausalLM.from_pretrained(llama), trained.model.as_stored()
    others = original.state_dict()
    kept = {name: weight for name, weight in stored.state_dict().items() if name.startswith(("model.", "lm_head."))}
    changed = {name for name, weight in kept.items() if not torch.equal(weight, others[name])}
    projections = [name for name in others if "_proj." in name]
    assert changed == set(projections)
    assert torch.equal(NviumForCausalLM.from_pretrained(trained.settings.target)(IDS).logits, stored(IDS).logits)
    for name, a_rI, b_Or in zip(projections, trained.model.updates.a, trained.model.updates.b, strict=True):
        assert torch.equal(kept[name], (others[name].float() + SCALE * b_Or @ a_rI).bfloat16())


def test_the_command_says_that_the_original_is_gone_and_samples_from_the_exits(
    llama: Path, data: Path, tmp_path: Path
) -> None:
    asked = ["retrofit", str(llama), str(tmp_path / "target"), "--data", str(data), "--tokens", "1024", *OPTIONS]
    ran = CliRunner().invoke(app, asked, env={"COLUMNS": "120"})
    assert ran.exit_code == 0, ran.output
    assert f"Its layers are no longer those of {llama}" in ran.output and "no sampling gives" in ran.output
    assert load_model(str(tmp_path / "target")).model.config.default_sampling == "exits"
