from dataclasses import replace

import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.training.data.windows import Batch, packed_batch
from nvium_core.training.objective.loss import ObjectiveResult, Phase, nvium_objective
from tests.random_models import random_model

WINDOW = torch.randint(1, 17, (2, 21), generator=torch.Generator().manual_seed(0))


def unpacked() -> Batch:
    return packed_batch(WINDOW[:, :-1], WINDOW[:, 1:], end_token=0)


def outcome_of(model: NviumForCausalLM, batch: Batch, alpha: float = 0.0, beta: float = 0.0) -> ObjectiveResult:
    return nvium_objective(model, batch, Phase(0, 0.0, torch.tensor(alpha), torch.tensor(beta)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_losses_equal_those_of_the_models_forward(dtype):
    model = random_model([1, 2, 4], dtype=dtype)
    expected = model(WINDOW, labels=WINDOW)
    found = outcome_of(model, unpacked()).metrics
    tolerance = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(found["mix_loss"], expected.mix_loss, **tolerance)
    torch.testing.assert_close(found["mean_depth"], expected.compute_loss, **tolerance)
    torch.testing.assert_close(found["balance_loss"], expected.balance_loss, **tolerance)
    torch.testing.assert_close(found["exit_probs"], expected.exit_probs[:, :-1].mean((0, 1)), **tolerance)


def gradients(model: NviumForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_equal_those_of_the_models_forward():
    ours, theirs = random_model([1, 2, 4]), random_model([1, 2, 4])
    outcome_of(ours, unpacked(), alpha=0.5, beta=0.25).loss.backward()
    output = theirs(WINDOW, labels=WINDOW)
    (output.loss + 0.5 * output.balance_loss + 0.25 * output.compute_loss).backward()
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
def test_means_leave_out_targets_that_do_not_count():
    model, batch = random_model([1, 2, 4], dtype=torch.float64), unpacked()
    counted = torch.zeros_like(batch.counted)
    counted[1, 4:9] = True
    found = outcome_of(model, replace(batch, counted=counted), alpha=1.0, beta=1.0)
    labels = torch.full_like(WINDOW, -100)
    labels[1, 5:10] = WINDOW[1, 5:10]
    expected = model(WINDOW, labels=labels)
    torch.testing.assert_close(found.metrics["mix_loss"], expected.mix_loss)
    torch.testing.assert_close(found.loss, expected.mix_loss + expected.balance_loss + expected.compute_loss)
    torch.testing.assert_close(found.metrics["exit_probs"], expected.exit_probs[1, 4:9].mean(0))
