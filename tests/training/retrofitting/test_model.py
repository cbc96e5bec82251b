import pytest
import torch

from nvium_core.model import mixture
from nvium_core.training.retrofitting.model import log_odds, shift_routers, shift_to, shifted_log_exit_probs
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
