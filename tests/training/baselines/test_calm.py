"""CALM*'s model: an N-vium of norms alone that speaks for its last exit, loads strictly and learns at every exit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nvium_core import CheckpointError, NviumForCausalLM
from nvium_core.evaluation.predictions import window_predictions
from nvium_core.model.nvium import token_nll
from nvium_core.training.baselines.calm import CalmConfig, CalmForCausalLM, build_calm, calm_objective
from tests.training.baselines.small_models import phase, small_batch, small_calm, small_config, small_univium

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_calm().save_pretrained(tmp_path)
    return tmp_path


def test_exits_have_a_norm_each_and_nothing_else() -> None:
    model = build_calm(small_config(num_layers=24, num_exits=4))
    assert model.config.exit_layers == [6, 12, 18, 24]
    assert [name for name in model.state_dict() if name.startswith("exits")] == [
        f"exits.{k}.norm.weight" for k in range(4)
    ]


@torch.no_grad()
def test_the_forward_pass_is_that_of_a_llama_with_the_last_exits_norm() -> None:
    calm, llama = small_calm(), small_univium(num_layers=6)
    tensors = {name: tensor for name, tensor in calm.state_dict().items() if not name.startswith("exits")}
    llama.load_state_dict(tensors | {"exits.0.norm.weight": calm.state_dict()["exits.2.norm.weight"]})
    output = calm(TOKENS, labels=TOKENS)
    torch.testing.assert_close(output.logits, llama(TOKENS).logits)
    torch.testing.assert_close(output.loss, llama(TOKENS, labels=TOKENS).loss)
    assert output.exit_probs[0, 0].tolist() == [0, 0, 1]


def test_a_saved_model_loads_back_unchanged(folder: Path) -> None:
    loaded, expected = CalmForCausalLM.from_pretrained(folder), small_calm().state_dict()
    assert isinstance(loaded.config, CalmConfig) and loaded.config.exit_layers == [2, 4, 6]
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, small_calm()(TOKENS).logits)
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is CalmForCausalLM


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["exits.1.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing tensor exits\.1\.norm\.weight"):
        CalmForCausalLM.from_pretrained(folder)


def test_folders_of_other_kinds_are_refused(tmp_path: Path, folder: Path) -> None:
    small_univium().save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="'llama' is not calm"):
        CalmForCausalLM.from_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="'calm' is none of those that load: nvium, llama"):
        NviumForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="no such model folder"):
        CalmForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_a_damaged_configuration_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"exit_layers": [2, 2, 6]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="strictly increasing"):
        CalmForCausalLM.from_pretrained(folder)
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CalmForCausalLM.from_pretrained(folder)


def test_the_objective_weighs_exits_by_their_depth() -> None:
    model, batch = small_calm(), small_batch(num_windows=1)
    outcome = calm_objective(model, batch, phase())
    nll_TE = window_predictions(model, batch.inputs[0, :10].tolist(), 1).exit_nll
    first_document = small_batch(num_windows=1)
    first_document.counted[:, 9:] = False
    figures = calm_objective(model, first_document, phase()).figures
    torch.testing.assert_close(figures["exit_losses"], nll_TE.mean(0))
    depths = torch.tensor([2, 4, 6], dtype=torch.float64)
    torch.testing.assert_close(outcome.loss, (outcome.figures["exit_losses"] * depths).sum() / 12)
    assert outcome.figures["mix_loss"] == outcome.figures["exit_losses"][-1]


def test_only_counted_targets_count() -> None:
    model, batch = small_calm(), small_batch()
    batch.counted[:] = False
    batch.counted[1, 3] = True
    with torch.no_grad():
        outcome = calm_objective(model, batch, phase())
        logits_EV = model(batch.inputs[1:2, :4], output_exit_logits=True).exit_logits[0, 3]
    expected_E = token_nll(logits_EV, batch.targets[1, 3].expand(3))
    torch.testing.assert_close(outcome.figures["exit_losses"], expected_E)


def test_every_weight_learns() -> None:
    model = small_calm()
    calm_objective(model, small_batch(), phase()).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
