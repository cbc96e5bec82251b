"""Initial weights are those of the authors' code."""

import pytest
import torch
from torch import Tensor

from nvium_core import NviumConfig, NviumForCausalLM

WIDTH = 256


@pytest.fixture(scope="module")
def model() -> NviumForCausalLM:
    torch.manual_seed(0)
    config = NviumConfig(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        exit_layers=[1, 2, 3, 4],
    )
    return NviumForCausalLM(config)


def gathered(model: NviumForCausalLM, part: str) -> Tensor:
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if part in name])


@pytest.mark.parametrize(
    ("part", "deviation"),
    [
        ("embed_tokens.weight", 0.02),
        ("lm_head.weight", 0.02),
        ("q_proj.weight", 0.02),
        ("down_proj.weight", 0.02),
        ("router.fc1.weight", 0.02),
        ("router.fc2.weight", 0.02),
        ("adapter.up.weight", WIDTH**-0.5),
        ("router.head.weight", 0.4 * WIDTH**-0.5),
    ],
)
def test_matrices_start_normal_with_the_authors_deviation(model: NviumForCausalLM, part: str, deviation: float) -> None:
    weights = gathered(model, part)
    assert weights.std().item() == pytest.approx(deviation, rel=4 / weights.numel() ** 0.5)
    assert abs(weights.mean().item()) < 5 * deviation / weights.numel() ** 0.5


@pytest.mark.parametrize("part", ["adapter.down.weight", "bias"])
def test_adapters_outputs_and_biases_start_at_zero(model: NviumForCausalLM, part: str) -> None:
    assert not gathered(model, part).any()


def test_norms_start_at_one(model: NviumForCausalLM) -> None:
    assert (gathered(model, "norm") == 1).all()
