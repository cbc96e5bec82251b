import pytest
import torch
from torch import Tensor

from nvium_core.model import mixture
from nvium_core.training.retrofitting import model as module
from nvium_core.training.retrofitting.model import (
    head_kl,
    log_odds,
    shift_routers,
    shift_to,
    shifted_log_exit_probs,
    teacher_of,
)
from tests.random_models import random_model

LAYERS = [1, 2, 4]
ROWS = 3 * torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS[:, -1] = torch.inf


@pytest.mark.parametrize("depth", [0.3, 0.55, 0.85, 0.99])
def test_the_mean_depth_is_the_requested_one(depth):
    log_p_RE = shifted_log_exit_probs(ROWS, shift_to(depth, ROWS, LAYERS))
    assert mixture.mean_depth(log_p_RE, LAYERS).mean() == pytest.approx(depth, abs=1e-9)
    assert log_p_RE.exp().sum(1) == pytest.approx(torch.ones(500))


def test_infinite_log_odds_stay_and_the_others_meet_the_depth():
    certain_RE = ROWS.clone()
    certain_RE[:100, :-1], certain_RE[100:200, 0] = -torch.inf, torch.inf
    log_p_RE = shifted_log_exit_probs(certain_RE, shift_to(0.7, certain_RE, LAYERS))
    assert log_p_RE[:100, -1].exp().eq(1).all() and log_p_RE[100:200, 0].exp().eq(1).all()
    assert mixture.mean_depth(log_p_RE, LAYERS).mean() == pytest.approx(0.7, abs=1e-9)


def test_shifted_routers_have_shifted_log_odds():
    model = random_model([1, 2, 4], vocab_size=61)
    early = model.exits[:-1]
    for exit_ in early:
        exit_.router.temperature = 0.5
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).exit_probs[0]
        states = model.model.embed_tokens(ids)[0]
        original = torch.stack([exit_(states)[0] for exit_ in early], 1)
        shift_routers(early, 1.5)
        shifted = torch.stack([exit_(states)[0] for exit_ in early], 1)
        assert log_odds(shifted) == pytest.approx(log_odds(original) + 1.5)
        assert (model(ids).exit_probs[0, :, -1] < before[:, -1]).all()


WIDTH, VOCABULARY, NUM_ROWS = 8, 50, 21


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEAD = normal(VOCABULARY, WIDTH, seed=0)
LAST, EARLY = normal(NUM_ROWS, WIDTH, seed=1), normal(NUM_ROWS, WIDTH, seed=2)
TARGET = torch.arange(NUM_ROWS) % VOCABULARY


def kl_over_all(early: Tensor, top: int) -> Tensor:
    p, log_q = (LAST @ HEAD.T).softmax(-1), (early @ HEAD.T).log_softmax(-1)
    order = p.argsort(descending=True)
    p, q = p.gather(1, order), log_q.exp().gather(1, order)
    p, q = (torch.cat([x[:, :top], x[:, top:].sum(1, keepdim=True)], 1) for x in (p, q))
    return (p * (p / q).log()).sum(1)


@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_losses_and_their_gradients_equal_the_definition(top, monkeypatch):
    monkeypatch.setattr(module, "TOP", top)
    monkeypatch.setattr(module, "CHUNK_ROWS", 8)
    ours, theirs = (EARLY.clone().requires_grad_() for _ in range(2))
    weights_R, others_R = torch.linspace(0.5, 2, NUM_ROWS), torch.linspace(3, -1, NUM_ROWS)
    kl_R, nll_R = head_kl(ours, HEAD, teacher_of(LAST, HEAD, TARGET), TARGET)
    expected_kl_R = kl_over_all(theirs, top)
    expected_nll_R = -(theirs @ HEAD.T).log_softmax(-1)[torch.arange(NUM_ROWS), TARGET]
    torch.testing.assert_close(kl_R, expected_kl_R, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(nll_R, expected_nll_R)
    (kl_R @ weights_R + nll_R @ others_R).backward()
    (expected_kl_R @ weights_R + expected_nll_R @ others_R).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss", ["kl", "nll"])
def test_each_loss_has_its_gradient_without_the_other(loss):
    ours, theirs = (EARLY.clone().requires_grad_() for _ in range(2))
    found = head_kl(ours, HEAD, teacher_of(LAST, HEAD, TARGET), TARGET)[loss == "nll"]
    expected = (theirs @ HEAD.T).log_softmax(-1)[torch.arange(NUM_ROWS), TARGET]
    found.sum().backward()
    (kl_over_all(theirs, module.TOP) if loss == "kl" else -expected).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_an_exit_equal_to_the_last_has_no_loss_and_no_gradient():
    same = LAST.clone().requires_grad_()
    kl_R, _ = head_kl(same, HEAD, teacher_of(LAST, HEAD, TARGET), TARGET)
    kl_R.sum().backward()
    assert kl_R.abs().max() < 1e-5
    assert same.grad.abs().max() < 1e-5
