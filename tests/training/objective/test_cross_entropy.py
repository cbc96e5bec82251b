import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.model.nvium import token_nll
from nvium_core.training.objective import cross_entropy
from nvium_core.training.objective.cross_entropy import BlockNll, block_head_nll, chunked_head_nll, head_nll

PARTS = pytest.mark.parametrize("nll_in_parts", [chunked_head_nll, block_head_nll])


@PARTS
@given(num_rows=st.integers(1, 9), num_words=st.integers(2, 11), seed=st.integers(0, 99))
def test_parts_do_not_change_losses_or_gradients(nll_in_parts, num_rows, num_words, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ROWS", 4)
        patch.setattr(cross_entropy, "MAX_LOGITS", 1)
        patch.setattr(cross_entropy, "BLOCK_WORDS", 4)
        generator = torch.Generator().manual_seed(seed)
        output = torch.randn(2, num_rows, 5, generator=generator, dtype=torch.float64)
        head = torch.randn(num_words, 5, generator=generator, dtype=torch.float64)
        target = torch.randint(num_words, (2, num_rows), generator=generator)
        weight = torch.randn(2, num_rows, generator=generator, dtype=torch.float64)
        found = gradients(nll_in_parts, output, head, target, weight)
        expected = gradients(lambda o, h, t: token_nll(o @ h.T, t), output, head, target, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("logit", [63.0, 79.0, 200.0, -200.0])
@pytest.mark.parametrize("word", [0, -1])
def test_large_logits_do_not_overflow(logit, word):
    head = torch.linspace(0.999, 1, 20_000)[:, None]
    head[0] = 0.5
    example = torch.tensor([[logit]]), head, torch.tensor([word % len(head)]), torch.ones(1)
    found = gradients(block_head_nll, *example)
    for one, other in zip(found, gradients(lambda o, h, t: token_nll(o @ h.T, t), *example), strict=True):
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
        cross_entropy.free_bytes.cache_clear()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 * gib))
        assert cross_entropy.max_logits("cuda") // 32_000 + 1 == rows
        assert cross_entropy.chunk_rows(head) == max(512, (rows - 1) // 8)
    cross_entropy.free_bytes.cache_clear()
    assert cross_entropy.max_logits("cpu") // 32_000 + 1 == 2_098


def gradients(nll, output, head, target, weight):
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
        patch.setattr(cross_entropy, "MAX_LOGITS", 53)
        in_parts = head_nll(output, head, target)
    torch.testing.assert_close(plain, in_parts)
    names = [losses.grad_fn.next_functions[0][0].name() for losses in (plain, in_parts)]
    assert names[1] == f"{BlockNll.__name__}Backward" != names[0]
