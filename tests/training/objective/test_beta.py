import math

import pytest

from nvium_core.training.objective.beta import BetaControl, BetaSettings


def test_beta_rises_if_the_smoothed_depth_is_too_large_and_falls_if_it_is_too_small():
    deep, shallow = BetaControl(beta=0.1, target=0.5), BetaControl(beta=0.1, target=0.5)
    deep.observe_depth(0.9)
    shallow.observe_depth(0.2)
    assert deep.beta == pytest.approx(0.1 * math.exp(0.05 * 0.4))
    assert shallow.beta == pytest.approx(0.1 * math.exp(-0.05 * 0.3))
    deep.observe_depth(0.4)
    assert deep.depth == pytest.approx(0.98 * 0.9 + 0.02 * 0.4)
    assert deep.beta > 0.1 * math.exp(0.05 * 0.4)


@pytest.mark.parametrize(("depth", "bound"), [(1.0, 1.0), (0.0, 1e-3)])
def test_a_steered_beta_stays_within_its_bounds(depth, bound):
    steering = BetaControl(beta=0.1, target=0.5)
    for _ in range(500):
        steering.observe_depth(depth)
    assert steering.beta == bound


@pytest.mark.parametrize("num_steps", [97, 292, 634, 3906])
@pytest.mark.parametrize(("beta", "depth"), [(0.2, 0.4), (0.004, 0.85), (0.04, 0.3), (0.3, 0.95)])
def test_steering_reaches_its_depth_from_both_sides_in_short_and_long_runs(num_steps, beta, depth):
    """The depth of a toy model falls with log β, with a lag of ten steps."""
    steering, depths = BetaControl.of(BetaSettings(initial=beta, depth=0.68), num_steps), list[float]()
    for _ in range(num_steps):
        steering.observe_depth(depth)
        depth += (1 / (1 + math.sqrt(steering.beta / 0.1)) - depth) / 10
        depths.append(depth)
    last = depths[-num_steps // 10 :]
    assert last == pytest.approx([0.68] * len(last), abs=0.03)


def test_settings_select_the_controller():
    fixed = BetaControl.of(BetaSettings(initial=0.1), 3000)
    fixed.observe_depth(0.9)
    assert fixed == BetaControl(beta=0.1)
    steered = BetaControl.of(BetaSettings(initial=0.1, depth=0.7), 30)
    assert steered == BetaControl(beta=0.1, target=0.7, speed_up=10)


def test_a_controller_resumes_from_its_state():
    steering, other = BetaControl(beta=0.1, target=0.5), BetaControl(beta=0.3, target=0.5)
    steering.observe_depth(0.9)
    other.restore(steering.state())
    assert other == steering
