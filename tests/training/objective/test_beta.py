import json
import math

import pytest

from nvium_core.training.errors import TrainingError
from nvium_core.training.objective.beta import (
    AdaptiveBeta,
    BetaControl,
    BetaSettings,
    DepthSteering,
    beta_control,
    nearest,
)


def test_beta_rises_if_the_smoothed_depth_is_too_large_and_falls_if_it_is_too_small():
    deep, shallow = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.1, target=0.5)
    deep.observe_depth(0.9)
    shallow.observe_depth(0.2)
    assert deep.beta == pytest.approx(0.1 * math.exp(0.05 * 0.4))
    assert shallow.beta == pytest.approx(0.1 * math.exp(-0.05 * 0.3))
    deep.observe_depth(0.4)
    assert deep.depth == pytest.approx(0.98 * 0.9 + 0.02 * 0.4)
    assert deep.beta > 0.1 * math.exp(0.05 * 0.4)


@pytest.mark.parametrize(("depth", "bound"), [(1.0, 1.0), (0.0, 1e-3)])
def test_a_steered_beta_stays_within_its_bounds(depth, bound):
    steering = DepthSteering(beta=0.1, target=0.5)
    for _ in range(500):
        steering.observe_depth(depth)
    assert steering.beta == bound


@pytest.mark.parametrize("num_steps", [97, 292, 634, 3906])
@pytest.mark.parametrize(("beta", "depth"), [(0.2, 0.4), (0.004, 0.85), (0.04, 0.3), (0.3, 0.95)])
def test_steering_reaches_its_depth_from_both_sides_in_short_and_long_runs(num_steps, beta, depth):
    """The depth of a toy model falls with log β, with a lag of ten steps."""
    steering, depths = beta_control(BetaSettings(initial=beta, depth=0.68), num_steps), list[float]()
    for _ in range(num_steps):
        steering.observe_depth(depth)
        depth += (1 / (1 + math.sqrt(steering.beta / 0.1)) - depth) / 10
        depths.append(depth)
    last = depths[-num_steps // 10 :]
    assert last == pytest.approx([0.68] * len(last), abs=0.03)


DENSE_LOSSES = [(100, 3.0), (200, 2.9), (300, 2.8), (400, 2.75)]


def test_an_adaptive_beta_follows_a_trace_computed_by_hand():
    control = AdaptiveBeta(beta=0.0, dense_losses=DENSE_LOSSES)
    trace = []
    for step, mix_loss in [(100, 2.90), (200, 2.904), (300, 2.83), (400, 2.60), (410, 3.00), (420, 5.75)]:
        control.observe_loss(step, mix_loss)
        trace.append(control.beta)
    # δ: +.1 → +8 · .1; −.004 is flat; −.03 → −4 · .03; +.15 → +1.2; −.25 → −1; −3 → −12, clamped to 0
    assert trace == pytest.approx([0.8, 0.8, 0.68, 1.88, 0.88, 0.0])


def test_the_nearest_of_two_equally_near_losses_is_the_earlier():
    assert [nearest(DENSE_LOSSES, step) for step in (0, 149, 150, 151, 999)] == [3.0, 3.0, 3.0, 2.9, 2.75]


def test_settings_select_the_controller(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [{"step": 1, "mix_loss": 5.0}, {"step": 2, "mix_loss": 4.0, "validation_loss": 4.5}]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert beta_control(BetaSettings(initial=0.1), 100) == BetaControl(beta=0.1)
    assert beta_control(BetaSettings(initial=0.1, depth=0.7), 30) == DepthSteering(beta=0.1, target=0.7, speed_up=10)
    adaptive = beta_control(BetaSettings(initial=0.0, adaptive=True), 100, log)
    assert adaptive == AdaptiveBeta(beta=0.0, dense_losses=[(2, 4.5)])


def test_a_controller_resumes_from_its_state():
    steering, other = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.3, target=0.5)
    steering.observe_depth(0.9)
    other.restore(steering.state())
    assert other == steering


@pytest.mark.parametrize("content", ["", "not json", '{"validation_loss": 3}', '{"step": 1, "mix_loss": 3}', "3"])
def test_a_dense_log_without_validation_losses_is_refused_by_name(tmp_path, content):
    log = tmp_path / "log.jsonl"
    log.write_text(content, encoding="utf-8")
    with pytest.raises(TrainingError, match=r"log\.jsonl"):
        beta_control(BetaSettings(initial=0.0, adaptive=True), 100, log)
