"""Compares `engine_logits` with PyTorch's operators. Compiles the kernels once more, so it is slow."""

import pytest
import torch

from research.distance.__main__ import CHUNK_ROWS, Distances, Reference
from research.distance.native import engine_logits
from tests.bench.test_contenders import loud_twin


def test_kl_is_that_of_the_distributions_and_zero_for_the_reference():
    x_TV, y_TV = torch.randn(2, CHUNK_ROWS + 3, 50)
    target_T = torch.arange(CHUNK_ROWS + 3) % 50
    reference, same, other = Reference(x_TV, target_T), Distances(), Distances()
    same.add(reference, slice(0, None), x_TV)
    other.add(reference, slice(0, None), y_TV)
    log_p_TV, log_q_TV = (logits.double().log_softmax(-1) for logits in (x_TV, y_TV))
    expected_T = torch.nn.functional.kl_div(log_q_TV, log_p_TV, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(torch.tensor(other.kl, dtype=torch.float64), expected_T)
    assert max(map(abs, same.kl)) < 1e-12 and all(same.is_same)
    perplexity = torch.nn.functional.cross_entropy(y_TV.double(), target_T).exp()
    assert other.figures()["perplexity"] == pytest.approx(float(perplexity))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)])
@torch.inference_mode()
def test_the_engines_logits_are_those_of_the_model_at_every_position_of_every_step(dtype, tolerance):
    model = loud_twin().to(dtype)
    token_ids = [number % 101 for number in range(300)]  # more rows than a Step has
    expected_TV = model(torch.tensor([token_ids]), output_exit_logits=True).exit_logits[0, :, 0].float()
    assert expected_TV.std() > 1
    logits = engine_logits(model, len(token_ids), "auto")
    for _ in range(2):  # a cache that has pages of an earlier text
        found = logits(token_ids)
        assert len(found) > 1
        assert (torch.cat(found) - expected_TV).std() < tolerance
