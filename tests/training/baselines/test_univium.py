"""The dense baseline is a Llama, and its folder says so."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from nvium_core import NviumForCausalLM
from nvium_core.training.baselines.univium import UniviumForCausalLM, univium_config
from tests.random_models import randomized
from tests.training.baselines.small_models import small_config, small_univium

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small_univium().save_pretrained(path)
    return path


def test_a_saved_model_is_a_plain_llama(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert "exit_layers" not in config and "router_hidden_size" not in config
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(llama) is LlamaForCausalLM
    assert llama.config.rope_parameters == small_config().rope_parameters
    with torch.no_grad():
        found, expected = llama(TOKENS).logits.log_softmax(-1), small_univium()(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # its norms are always computed in float32


@pytest.mark.parametrize("kind", [NviumForCausalLM, UniviumForCausalLM])
def test_our_classes_load_it_back_unchanged(kind: type[NviumForCausalLM], folder: Path) -> None:
    model = kind.from_pretrained(folder)
    expected = small_univium().state_dict()
    assert model.dtype == torch.float64
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_saving_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model = small_univium()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_tied_weights_are_saved_once_and_load_back(tmp_path: Path) -> None:
    config = small_config()
    config.tie_word_embeddings = True
    model = randomized(UniviumForCausalLM(univium_config(config)).double(), seed=1)
    model.save_pretrained(tmp_path)
    loaded = NviumForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
