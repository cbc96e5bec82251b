"""LayerSkip's training: curriculum, weights of exits, layer dropout and loss."""

import math

import pytest
import torch

from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import token_nll
from research.baselines.layerskip import active, dropout, kept_layers, loss_weights, objective
from tests.research.baselines.small_models import phase, small_batch, small_layerskip

EARLY = [*range(2, 24, 2)]


def test_dropout_rises_over_layers_and_time_to_its_maximum():
    assert dropout(24, progress=0.0) == [0.0] * 24
    at_the_end = dropout(24, progress=1.0)
    assert at_the_end[0] == 0 and at_the_end[-1] == pytest.approx(0.3)
    assert at_the_end[7] == pytest.approx((math.exp(7 * math.log(2) / 23) - 1) * 0.3)
    half_way = dropout(24, progress=0.5)
    assert half_way[-1] == pytest.approx((math.exp(0.5 * math.log(2)) - 1) * 0.3)
    assert half_way == sorted(half_way)


def test_the_gradual_curriculum_enables_exits_from_the_deepest_and_all_after_half_of_the_steps():
    assert active(EARLY, 24, 0.0) == []
    assert active(EARLY, 24, 2 / 48) == [22]  # two layers, each a 2 L-th of the run
    assert active(EARLY, 24, 0.2499) == [14, 16, 18, 20, 22]
    assert active(EARLY, 24, 0.25) == [12, 14, 16, 18, 20, 22]
    assert active(EARLY, 24, 0.5) == active(EARLY, 24, 0.99) == EARLY


def test_weights_grow_quadratically_with_depth():
    assert loss_weights([2, 4], 0.9) == pytest.approx({2: 1 / 7, 4: 6 / 7})  # 0 + 1 against 3 + (0 + 1 + 2)
    assert loss_weights([2, 4], 0.0) == {4: 1}


def test_layers_are_dropped_with_their_probability():
    batch, shares = small_batch(num_windows=50), [0.0, 0.1, 0.3, 0.6]
    kept_LB = torch.cat([kept_layers(batch, step, shares) for step in range(40)], dim=1)
    assert kept_LB.shape == (4, 2000)
    deviation = 4 * math.sqrt(0.25 / 2000)
    assert (1 - kept_LB.double().mean(1)).tolist() == pytest.approx(shares, abs=deviation)
    assert kept_LB[0].all()


def test_without_dropout_and_early_exits_the_loss_is_the_dense_one():
    model, batch = small_layerskip(), small_batch()
    batch.counted[:, ::3] = False
    outcome = objective(model, batch, phase(progress=0.0))
    (h_BTD,) = model.hidden_states(batch.inputs, batch.positions, causal_attention(batch.mask()))
    expected = token_nll(model.lm_head(model.exits[0].norm(h_BTD)), batch.targets)[batch.counted].mean()
    torch.testing.assert_close(outcome.loss, expected)
    torch.testing.assert_close(outcome.metrics["mix_loss"], expected.detach())
    assert outcome.metrics["dropped_share"] == 0
