"""A checkpoint of the authors' code gives the numbers that their code computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nvium_core import NviumForCausalLM

FIXTURE = Path(__file__).parents[3] / "shared" / "fixtures" / "reference-4vium"

pytestmark = pytest.mark.skipif(not FIXTURE.is_dir(), reason="no reference fixture next to this checkout")


@torch.inference_mode()
def test_mixture_exit_probabilities_and_the_six_losses_equal_those_of_the_published_code():
    model, expected = NviumForCausalLM.from_pretrained(FIXTURE), load_file(FIXTURE / "expected.safetensors")
    output = model.double()(expected["input_ids"], labels=expected["input_ids"])
    torch.testing.assert_close(output.logits, expected["log_mix"], rtol=0, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(output.exit_probs, expected["exit_probs"], rtol=0, atol=1e-5, check_dtype=False)
    found = torch.stack([output.mix_loss, output.compute_loss, *output.exit_losses])
    names = ["mix_loss", "compute_loss", *(f"early_ce_loss_{k}" for k in (1, 2, 3)), "final_ce_loss"]
    wanted = torch.cat([expected[name].view(1) for name in names]).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
