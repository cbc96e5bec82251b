"""A checkpoint of the authors' code gives the numbers that their code computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nvium_core import NviumForCausalLM
from nvium_core.model.nvium import NviumOutput

FIXTURE = Path(__file__).parents[3] / "shared" / "fixtures" / "reference-4vium"

pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason="no reference fixture next to this checkout")


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(FIXTURE / "expected.safetensors")


@pytest.fixture(scope="module")
def output(expected: dict[str, Tensor]) -> NviumOutput:
    model = NviumForCausalLM.from_pretrained(FIXTURE, dtype=torch.float64)
    with torch.inference_mode():
        return model(expected["input_ids"], labels=expected["input_ids"])


def test_mixture_and_exit_probabilities_equal_those_of_the_published_code(output, expected):
    torch.testing.assert_close(output.logits, expected["log_mix"], rtol=0, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(output.exit_probs, expected["exit_probs"], rtol=0, atol=1e-5, check_dtype=False)


def test_the_six_losses_equal_those_of_the_published_code(output, expected):
    found = torch.stack([output.mix_loss, output.compute_loss, *output.exit_losses])
    names = ["mix_loss", "compute_loss", *(f"early_ce_loss_{k}" for k in (1, 2, 3)), "final_ce_loss"]
    wanted = torch.cat([expected[name].view(1) for name in names]).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
