from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import NviumForCausalLM
from nvium_core.model.nvium import token_nll
from nvium_core.training import objective
from nvium_core.training.data.windows import Batch, packed_batch
from nvium_core.training.objective import (
    BlockNll,
    ObjectiveResult,
    Phase,
    block_head_nll,
    chunked_head_nll,
    head_nll,
    nvium_objective,
)
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


PARTS = pytest.mark.parametrize("nll_in_parts", [chunked_head_nll, block_head_nll])


@PARTS
@given(num_rows=st.integers(1, 9), num_words=st.integers(2, 11), seed=st.integers(0, 99))
def test_parts_do_not_change_losses_or_gradients(nll_in_parts, num_rows, num_words, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "CHUNK_ROWS", 4)
        patch.setattr(objective, "MAX_LOGITS", 1)
        patch.setattr(objective, "BLOCK_WORDS", 4)
        generator = torch.Generator().manual_seed(seed)
        output = torch.randn(2, num_rows, 5, generator=generator, dtype=torch.float64)
        head = torch.randn(num_words, 5, generator=generator, dtype=torch.float64)
        target = torch.randint(num_words, (2, num_rows), generator=generator)
        weight = torch.randn(2, num_rows, generator=generator, dtype=torch.float64)
        found = nll_and_gradients(nll_in_parts, output, head, target, weight)
        expected = nll_and_gradients(lambda o, h, t: token_nll(o @ h.T, t), output, head, target, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("logit", [63.0, 79.0, 200.0, -200.0])
@pytest.mark.parametrize("word", [0, -1])
def test_large_logits_do_not_overflow(logit, word):
    head = torch.linspace(0.999, 1, 20_000)[:, None]
    head[0] = 0.5
    example = torch.tensor([[logit]]), head, torch.tensor([word % len(head)]), torch.ones(1)
    found = nll_and_gradients(block_head_nll, *example)
    for one, other in zip(found, nll_and_gradients(lambda o, h, t: token_nll(o @ h.T, t), *example), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@PARTS
@pytest.mark.parametrize("logit", [10.0, 30.0])
def test_the_losses_of_certain_tokens_are_precise_in_bfloat16(nll_in_parts, logit):
    """The target's logit must not be rounded in the sum only."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(2000, 256, generator=generator) / 16
    target = torch.arange(64)
    output = logit * head[target] + 0.3 * torch.randn(64, 256, generator=generator)
    exact = token_nll(output.double() @ head.double().T, target).float()
    with torch.autocast("cpu", torch.bfloat16):
        losses = nll_in_parts(output, head, target)
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=1e-5)


def test_on_a_gpu_free_memory_decides_about_chunks(monkeypatch):
    head, gib = torch.empty(32_000, 1, device="meta"), 2**30
    for free, rows in ((70 * gib, 36_701), (2 * gib, 2_098)):
        objective.free_bytes.cache_clear()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 * gib))
        assert objective.max_logits("cuda") // 32_000 + 1 == rows
        assert objective.chunk_rows(head) == max(512, (rows - 1) // 8)
    objective.free_bytes.cache_clear()
    assert objective.max_logits("cpu") // 32_000 + 1 == 2_098


def nll_and_gradients(nll, output, head, target, weight):
    """Return the losses, and the gradients of their weighted sum by output and head."""
    output, head = output.clone().requires_grad_(), head.clone().requires_grad_()
    losses = nll(output, head, target)
    return losses, *torch.autograd.grad((losses * weight).sum(), (output, head))


@PARTS
def test_with_autocast_the_head_multiplies_in_bfloat16_and_sums_in_float32(nll_in_parts):
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(3, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator, requires_grad=True)
    target = torch.tensor([1, 5, 10])
    with torch.autocast("cpu", torch.bfloat16):
        losses = nll_in_parts(output, head, target)
    losses.sum().backward()
    assert losses.dtype == output.grad.dtype == head.grad.dtype == torch.float32
    exact = token_nll(output @ head.T, target)
    assert (losses - exact).abs().max() < 0.05
    assert not torch.equal(losses, exact)


def test_only_many_logits_are_computed_in_parts():
    output, head, target = torch.randn(6, 5), torch.randn(9, 5), torch.arange(6)
    plain = head_nll(output, head.requires_grad_(), target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "MAX_LOGITS", 53)
        in_parts = head_nll(output, head, target)
    torch.testing.assert_close(plain, in_parts)
    names = [losses.grad_fn.next_functions[0][0].name() for losses in (plain, in_parts)]
    assert names[1] == f"{BlockNll.__name__}Backward" != names[0]
