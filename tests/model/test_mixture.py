"""The mixture in log space against the same formulas in probability space, also for w_k of 0 and 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvium_core.model import mixture
from tests.random_models import random_model

LOG_ODDS = st.one_of(st.floats(-12, 12), st.sampled_from([-1e4, 1e4, -math.inf, math.inf]))
ROUTERS = st.lists(LOG_ODDS, max_size=6)
SEEDS = st.integers(0, 2**32 - 1)


def log_w(log_odds: list[float]) -> Tensor:
    """Return log-probabilities of continuing and exiting, [E, 2]; the last exit always emits."""
    odds_E = torch.tensor([*log_odds, math.inf], dtype=torch.float64)
    return torch.stack([torch.nn.functional.logsigmoid(-odds_E), torch.nn.functional.logsigmoid(odds_E)], -1)


@given(ROUTERS)
def test_exit_probabilities_follow_the_product_formula_and_sum_to_one(log_odds):
    found = mixture.log_exit_probs(log_w(log_odds)).exp()
    reached, expected = 1.0, []
    for w in log_w(log_odds)[:, 1].exp().tolist():
        expected.append(reached * w)
        reached *= 1 - w
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)


@given(ROUTERS, SEEDS)
def test_the_mixture_is_a_normalised_weighted_sum(log_odds, seed):
    log_p_E = mixture.log_exit_probs(log_w(log_odds))
    logits_EV = 3 * torch.randn(len(log_p_E), 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = mixture.log_mixture(log_p_E, logits_EV).exp()
    torch.testing.assert_close(found, log_p_E.exp() @ logits_EV.softmax(-1), rtol=1e-9, atol=1e-12)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)


@given(ROUTERS)
def test_mean_depth_and_balance_follow_their_formulas(log_odds):
    num_exits = len(log_odds) + 1
    w_E, depths = log_w(log_odds)[:, 1].exp().tolist(), [2 * k + 3 for k in range(num_exits)]
    p_E = mixture.log_exit_probs(log_w(log_odds)).exp().tolist()
    depth = sum(p * layer / depths[-1] for p, layer in zip(p_E, depths, strict=True))
    balance = sum((w_E[k - 1] - 1 / (num_exits - k + 1)) ** 2 for k in range(1, num_exits))
    assert mixture.mean_depth(mixture.log_exit_probs(log_w(log_odds)), depths).item() == pytest.approx(depth)
    assert mixture.balance_penalty(log_w(log_odds)).item() == pytest.approx(balance)


def test_routers_under_autocast_stay_normalised():
    """The MLP runs in autocast's precision; w is computed in float32."""
    router = random_model([1, 2], dtype=torch.float32).exits[0].get_submodule("router")
    x_XD = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        precise = router(x_XD)
        with torch.autocast("cpu", torch.bfloat16):
            fast = router(x_XD)
    assert fast.dtype == torch.float32 and not torch.equal(fast, precise)
    torch.testing.assert_close(fast.exp().sum(-1), torch.ones(50))
    torch.testing.assert_close(fast, precise, rtol=0.05, atol=0.05)


def test_mean_depth_is_not_rounded_under_autocast():
    log_p_E = torch.tensor([0.1234567, 0.8765433]).log()
    with torch.autocast("cpu", torch.bfloat16):
        found = mixture.mean_depth(log_p_E, [1, 3])
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(0.1234567 / 3 + 0.8765433, rel=1e-6)
