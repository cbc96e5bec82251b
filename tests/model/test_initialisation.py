import pytest
import torch
from torch import Tensor

from nvium_core import NviumForCausalLM
from tests.random_models import small_config

WIDTH = 256


@pytest.fixture(scope="module")
def model() -> NviumForCausalLM:
    torch.manual_seed(0)
    return NviumForCausalLM(small_config([1, 2, 3, 4], vocab_size=128, width=WIDTH))


def gathered(model: NviumForCausalLM, part: str) -> Tensor:
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if part in name])


DEVIATIONS = dict.fromkeys(("embed_tokens", "lm_head", "q_proj", "down_proj", "router.fc1", "router.fc2"), 0.02)
DEVIATIONS |= {"adapter.up": WIDTH**-0.5, "router.head": 0.4 * WIDTH**-0.5}


@pytest.mark.parametrize(("part", "deviation"), DEVIATIONS.items())
def test_matrices_start_normal_with_the_authors_deviation(model, part, deviation):
    weights = gathered(model, f"{part}.weight")
    assert weights.std().item() == pytest.approx(deviation, rel=4 / weights.numel() ** 0.5)
    assert abs(weights.mean().item()) < 5 * deviation / weights.numel() ** 0.5


@pytest.mark.parametrize(("part", "value"), [("adapter.down.weight", 0), ("bias", 0), ("norm", 1)])
def test_adapters_outputs_and_biases_start_at_zero_and_norms_at_one(model, part, value):
    assert (gathered(model, part) == value).all()
