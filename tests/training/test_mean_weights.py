"""The mean of models' weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.errors import TrainingError
from nvium_core.training.mean_weights import write_mean


def written(folder: Path, seed: int, width: int = 16) -> Path:
    torch.manual_seed(seed)
    config = NviumConfig(
        vocab_size=32, hidden_size=width, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, exit_layers=[1, 2],
    )  # fmt: skip
    NviumForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_every_weight_is_the_mean_and_the_model_loads(tmp_path: Path) -> None:
    folders = [written(tmp_path / str(seed), seed) for seed in range(3)]
    write_mean(folders, tmp_path / "mean")
    model = NviumForCausalLM.from_pretrained(tmp_path / "mean", dtype=torch.bfloat16)
    sources = [load_file(folder / "model.safetensors") for folder in folders]
    for name, weight in model.state_dict().items():
        expected = torch.stack([source[name].double() for source in sources]).mean(0)
        torch.testing.assert_close(weight.double(), expected, rtol=2**-8, atol=1e-6)
        assert not torch.equal(weight, sources[0][name]) or weight.unique().numel() == 1


def test_models_of_other_shapes_are_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    folders = [written(tmp_path / "a", 0), written(tmp_path / "b", 0, width=32)]
    with pytest.raises(TrainingError, match=r"b: weights of other names or shapes than those of .*a$"):
        write_mean(folders, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
