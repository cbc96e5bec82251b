"""β kept, steered and adapted."""

import json
import math
from pathlib import Path

import pytest

from nvium_core.training.objective.beta import (
    AdaptiveBeta,
    BetaControl,
    BetaError,
    BetaSettings,
    DepthSteering,
    beta_control,
    nearest,
)


def test_too_deep_a_model_makes_compute_dearer_and_too_shallow_a_one_cheaper() -> None:
    deep, shallow = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.1, target=0.5)
    deep.observe_depth(0.9)
    shallow.observe_depth(0.2)
    assert deep.beta == pytest.approx(0.1 * math.exp(0.05 * 0.4))
    assert shallow.beta == pytest.approx(0.1 * math.exp(-0.05 * 0.3))


@pytest.mark.parametrize(("depth", "bound"), [(1.0, 1.0), (0.0, 1e-3)])
def test_a_steered_beta_stays_within_its_bounds(depth: float, bound: float) -> None:
    steering = DepthSteering(beta=0.1, target=0.5)
    for _ in range(500):
        steering.observe_depth(depth)
    assert steering.beta == bound


def test_steering_goes_by_the_smoothed_depth() -> None:
    steering = DepthSteering(beta=0.1, target=0.5)
    steering.observe_depth(0.9)
    steering.observe_depth(0.4)
    assert steering.depth == pytest.approx(0.98 * 0.9 + 0.02 * 0.4)
    assert steering.beta > 0.1 * math.exp(0.05 * 0.4)


ANSWER_STEPS = 10


def steered_depths(steering: DepthSteering, num_steps: int, depth: float) -> list[float]:
    """Of a toy model whose depth is a falling function of log β, but for a lag of some steps."""
    depths = []
    for _ in range(num_steps):
        steering.observe_depth(depth)
        depth += (1 / (1 + math.sqrt(steering.beta / 0.1)) - depth) / ANSWER_STEPS
        depths.append(depth)
    return depths


@pytest.mark.parametrize("num_steps", [97, 292, 634, 3906])
@pytest.mark.parametrize(("beta", "depth"), [(0.2, 0.4), (0.004, 0.85), (0.04, 0.3), (0.3, 0.95)])
def test_steering_reaches_its_depth_from_both_sides_in_short_runs_and_in_long(
    num_steps: int, beta: float, depth: float
) -> None:
    steering = beta_control(BetaSettings(initial=beta, depth=0.68), num_steps)
    assert isinstance(steering, DepthSteering)
    last = steered_depths(steering, num_steps, depth)[-num_steps // 10 :]
    assert last == pytest.approx([0.68] * len(last), abs=0.03)


DENSE_LOSSES = [(100, 3.0), (200, 2.9), (300, 2.8), (400, 2.75)]


def test_an_adaptive_beta_follows_a_trace_reckoned_by_hand() -> None:
    control = AdaptiveBeta(beta=0.0, dense_losses=DENSE_LOSSES)
    trace = []
    for step, mix_loss in [(100, 2.90), (200, 2.904), (300, 2.83), (400, 2.60), (410, 3.00), (420, 5.75)]:
        control.observe_loss(step, mix_loss)
        trace.append(control.beta)
    # leads: +.1 → +8 · .1; −.004 is flat; −.03 → −4 · .03; +.15 → +1.2; −.25 → −1; −3 → −12, but not below 0
    assert trace == pytest.approx([0.8, 0.8, 0.68, 1.88, 0.88, 0.0])


def test_the_nearest_of_two_equally_near_losses_is_the_earlier() -> None:
    assert [nearest(DENSE_LOSSES, step) for step in (0, 149, 150, 151, 999)] == [3.0, 3.0, 3.0, 2.9, 2.75]


def test_settings_choose_the_control(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"step": 1, "mix_loss": 5.0}, {"step": 2, "mix_loss": 4.0, "validation_loss": 4.5}]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert beta_control(BetaSettings(initial=0.1), 100) == BetaControl(beta=0.1)
    steering = beta_control(BetaSettings(initial=0.1, depth=0.7), 30)
    assert steering == DepthSteering(beta=0.1, target=0.7, haste=10)
    adaptive = beta_control(BetaSettings(initial=0.0, adaptive=True), 100, log)
    assert adaptive == AdaptiveBeta(beta=0.0, dense_losses=[(2, 4.5)])


def test_a_control_goes_on_from_its_state() -> None:
    steering, other = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.3, target=0.5)
    steering.observe_depth(0.9)
    other.restore(steering.state())
    assert other == steering


@pytest.mark.parametrize("content", ["", "not json", '{"validation_loss": 3}', '{"step": 1, "mix_loss": 3}', "3"])
def test_a_dense_log_that_says_nothing_is_refused_by_name(tmp_path: Path, content: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(content, encoding="utf-8")
    with pytest.raises(BetaError, match=r"log\.jsonl"):
        beta_control(BetaSettings(initial=0.0, adaptive=True), 100, log)
