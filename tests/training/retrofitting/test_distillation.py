import pytest
import torch
from torch import Tensor

from nvium_core.training.retrofitting import distillation
from nvium_core.training.retrofitting.distillation import head_kl, teacher_of

WIDTH, VOCABULARY, ROWS = 8, 50, 21


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEAD = normal(VOCABULARY, WIDTH, seed=0)
LAST, EARLY = normal(ROWS, WIDTH, seed=1), normal(ROWS, WIDTH, seed=2)
TARGET = torch.arange(ROWS) % VOCABULARY


def kl_over_all(early: Tensor, top: int) -> Tensor:
    p, log_q = (LAST @ HEAD.T).softmax(-1), (early @ HEAD.T).log_softmax(-1)
    order = p.argsort(descending=True)
    p, q = p.gather(1, order), log_q.exp().gather(1, order)
    p, q = (torch.cat([x[:, :top], x[:, top:].sum(1, keepdim=True)], 1) for x in (p, q))
    return (p * (p / q).log()).sum(1)


@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_losses_and_their_gradients_equal_the_definition(top, monkeypatch):
    monkeypatch.setattr(distillation, "TOP", top)
    monkeypatch.setattr(distillation, "CHUNK_ROWS", 8)
    ours, theirs = (EARLY.clone().requires_grad_() for _ in range(2))
    weights_R, others_R = torch.linspace(0.5, 2, ROWS), torch.linspace(3, -1, ROWS)
    kl_R, nll_R = head_kl(ours, HEAD, teacher_of(LAST, HEAD, TARGET), TARGET)
    expected_kl_R = kl_over_all(theirs, top)
    expected_nll_R = -(theirs @ HEAD.T).log_softmax(-1)[torch.arange(ROWS), TARGET]
    torch.testing.assert_close(kl_R, expected_kl_R, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(nll_R, expected_nll_R)
    (kl_R @ weights_R + nll_R @ others_R).backward()
    (expected_kl_R @ weights_R + expected_nll_R @ others_R).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", ["kl", "nll"])
def test_each_loss_has_its_gradient_without_the_other(loss):
    ours, theirs = (EARLY.clone().requires_grad_() for _ in range(2))
    found = head_kl(ours, HEAD, teacher_of(LAST, HEAD, TARGET), TARGET)[loss == "nll"]
    expected = (theirs @ HEAD.T).log_softmax(-1)[torch.arange(ROWS), TARGET]
    found.sum().backward()
    (kl_over_all(theirs, distillation.TOP) if loss == "kl" else -expected).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_an_exit_equal_to_the_last_has_no_loss_and_no_gradient():
    same = LAST.clone().requires_grad_()
    kl_R, _ = head_kl(same, HEAD, teacher_of(LAST, HEAD, TARGET), TARGET)
    kl_R.sum().backward()
    assert kl_R.abs().max() < 1e-5
    assert same.grad.abs().max() < 1e-5
