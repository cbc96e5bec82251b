"""The training losses are the model's own, though computed without the mixture over the vocabulary."""

import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.training.data import Batch, packed_batch
from nvium_core.training.loss import Losses, batch_losses, objective
from tests.random_models import random_model

WINDOW = torch.randint(1, 17, (2, 21), generator=torch.Generator().manual_seed(0))


def unpacked() -> Batch:
    return packed_batch(WINDOW[:, :-1], WINDOW[:, 1:], end_token=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_losses_of_whole_documents_are_those_of_the_models_forward(dtype: torch.dtype) -> None:
    model = random_model([1, 2, 4], dtype=dtype)
    labels = WINDOW.clone()
    expected = model(WINDOW, labels=labels)
    found = batch_losses(model, unpacked())
    tolerance = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(found.mix, expected.mix_loss, **tolerance)
    torch.testing.assert_close(found.compute, expected.compute_loss, **tolerance)
    torch.testing.assert_close(found.balance, expected.balance_loss, **tolerance)
    torch.testing.assert_close(found.exit_probs, expected.exit_probs[:, :-1].mean((0, 1)), **tolerance)


def gradients(model: NviumForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_the_models_forward() -> None:
    ours, theirs = random_model([1, 2, 4]), random_model([1, 2, 4])
    objective(batch_losses(ours, unpacked()), alpha=0.5, beta=0.25).backward()
    output = theirs(WINDOW, labels=WINDOW)
    (output.loss + 0.5 * output.balance_loss + 0.25 * output.compute_loss).backward()
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_objective_weighs_balance_by_alpha_and_compute_by_beta() -> None:
    losses = Losses(*torch.tensor([3.0, 0.5, 0.25]), exit_probs=torch.ones(1))
    assert objective(losses, alpha=2.0, beta=0.1).item() == pytest.approx(3.0 + 2 * 0.25 + 0.1 * 0.5)
