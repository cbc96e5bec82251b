"""A retrofitted Llama answers as before at its last exit, and its early exits start as the paper starts them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvium_core import NviumForCausalLM
from nvium_core.model.checkpoint import CheckpointError
from nvium_core.training.retrofitting.papers_start import retrofit
from nvium_core.training.retrofitting.shape import RetrofitError
from tests.model.llama_folders import LLAMA_3_ROPE, llama_folder, random_llama
from tests.random_models import random_model

IDS = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(0))
EXIT_LAYERS = [1, 3, 4]


def last_exit(model: NviumForCausalLM) -> Tensor:
    return model(IDS, output_exit_logits=True).exit_logits[..., -1, :]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 10000.0}, LLAMA_3_ROPE], ids=["plain", "llama3"]
)
@torch.no_grad()
def test_the_last_exit_alone_is_the_llama(tied: bool, rope: dict[str, object], tmp_path: Path) -> None:
    llama = random_llama(num_hidden_layers=4, tie_word_embeddings=tied, rope_parameters=rope)
    folder = llama_folder(tmp_path, llama)
    model = retrofit(folder, EXIT_LAYERS)
    assert torch.equal(last_exit(model), last_exit(NviumForCausalLM.from_pretrained(folder)))
    torch.testing.assert_close(last_exit(model), llama(IDS).logits, rtol=1e-5, atol=1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama = random_llama(num_hidden_layers=4)
    with torch.no_grad():
        llama.model.norm.weight.uniform_(0.5, 1.5)
    return llama_folder(tmp_path, llama)


def test_every_exit_has_its_own_copy_of_the_final_norm_and_an_adapter_that_does_nothing(folder: Path) -> None:
    model = retrofit(folder, EXIT_LAYERS)
    norms = [exit_.norm.weight for exit_ in model.exits]
    assert all(torch.equal(norm, norms[-1]) for norm in norms) and not (norms[-1] == 1).any()
    assert len({norm.data_ptr() for norm in norms}) == len(norms)
    assert not any(exit_.adapter.down.weight.any() for exit_ in model.exits)


@torch.no_grad()
def test_routers_start_undecided(folder: Path) -> None:
    exit_probs = retrofit(folder, EXIT_LAYERS)(IDS).exit_probs.mean((0, 1))
    torch.testing.assert_close(exit_probs, torch.tensor([0.5, 0.25, 0.25]), rtol=0, atol=0.15)


def test_all_weights_are_trained(folder: Path) -> None:
    model = retrofit(folder, EXIT_LAYERS)
    model(IDS, labels=IDS).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == set()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_it_is_saved_and_loaded_as_any_n_vium(folder: Path, tmp_path: Path) -> None:
    model = retrofit(folder, EXIT_LAYERS)
    model.save_pretrained(tmp_path / "retrofitted")
    again = NviumForCausalLM.from_pretrained(tmp_path / "retrofitted")
    assert again.config.exit_layers == EXIT_LAYERS
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("exit_layers", [[1, 2], [2, 1, 4], [0, 4], []])
def test_exits_that_the_llama_cannot_have_are_refused(exit_layers: list[int], folder: Path) -> None:
    with pytest.raises(RetrofitError, match="exit_layers"):
        retrofit(folder, exit_layers)


def test_only_a_plain_llama_is_retrofitted(tmp_path: Path) -> None:
    random_model([1, 2], dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(RetrofitError, match="already"):
        retrofit(tmp_path, [1, 2])
    with pytest.raises(CheckpointError, match="nowhere"):
        retrofit(tmp_path / "nowhere", [1, 2])
