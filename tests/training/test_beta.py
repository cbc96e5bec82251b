"""β kept, steered and adapted."""

import json
import math
from pathlib import Path

import pytest

from nvium_core.training.beta import (
    AdaptiveBeta,
    BetaError,
    BetaSettings,
    DepthSteering,
    FixedBeta,
    beta_control,
    nearest,
)


def test_too_deep_a_model_makes_compute_dearer_and_too_shallow_a_one_cheaper() -> None:
    deep, shallow = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.1, target=0.5)
    deep.observe_depth(0.9)
    shallow.observe_depth(0.2)
    assert deep.beta == pytest.approx(0.1 * math.exp(0.05 * 0.4))
    assert shallow.beta == pytest.approx(0.1 * math.exp(-0.05 * 0.3))


def test_a_steered_beta_rests_at_the_target() -> None:
    steering = DepthSteering(beta=0.1, target=0.5)
    steering.observe_depth(0.5)
    assert steering.beta == 0.1


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


def test_a_fixed_beta_stays_as_it_is() -> None:
    beta = FixedBeta(beta=0.15)
    beta.observe_depth(1.0)
    beta.observe_loss(3, 2.0)
    assert beta.beta == 0.15


DENSE_LOSSES = [(100, 3.0), (200, 2.9), (300, 2.8), (400, 2.75)]


def test_an_adaptive_beta_follows_a_trace_reckoned_by_hand() -> None:
    control = AdaptiveBeta(beta=0.0, dense_losses=DENSE_LOSSES)
    trace = []
    for step, mix_loss in [(100, 2.90), (200, 2.904), (300, 2.83), (400, 2.60), (410, 3.00), (420, 5.75)]:
        control.observe_loss(step, mix_loss)
        trace.append(control.beta)
    # leads: +.1 → +8 · .1; −.004 is flat; −.03 → −4 · .03; +.15 → +1.2; −.25 → −1; −3 → −12, but not below 0
    assert trace == pytest.approx([0.8, 0.8, 0.68, 1.88, 0.88, 0.0])


def test_an_adaptive_beta_stops_at_its_maximum() -> None:
    control = AdaptiveBeta(beta=9.9, dense_losses=[(0, 4.0)])
    control.observe_loss(0, 1.0)
    assert control.beta == 10.0


def test_the_nearest_of_two_equally_near_losses_is_the_earlier() -> None:
    assert [nearest(DENSE_LOSSES, step) for step in (0, 149, 150, 151, 999)] == [3.0, 3.0, 3.0, 2.9, 2.75]


def test_settings_choose_the_control(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"step": 1, "mix_loss": 5.0}, {"step": 2, "mix_loss": 4.0, "validation_loss": 4.5}]
    log.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert beta_control(BetaSettings(initial=0.1)) == FixedBeta(beta=0.1)
    assert beta_control(BetaSettings(initial=0.1, depth=0.7)) == DepthSteering(beta=0.1, target=0.7)
    adaptive = beta_control(BetaSettings(initial=0.0, adaptive=True), log)
    assert adaptive == AdaptiveBeta(beta=0.0, dense_losses=[(2, 4.5)])


def test_a_control_goes_on_from_its_state() -> None:
    steering, other = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.3, target=0.5)
    steering.observe_depth(0.9)
    other.restore(steering.state())
    assert other == steering


def test_an_adaptive_beta_without_a_dense_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BetaError, match="needs the log"):
        beta_control(BetaSettings(initial=0.0, adaptive=True))


@pytest.mark.parametrize("content", ["", "not json", '{"validation_loss": 3}', '{"step": 1, "mix_loss": 3}', "3"])
def test_a_dense_log_that_says_nothing_is_refused_by_name(tmp_path: Path, content: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(content, encoding="utf-8")
    with pytest.raises(BetaError, match=r"log\.jsonl"):
        beta_control(BetaSettings(initial=0.0, adaptive=True), log)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"initial": -1.0}, "initial"),
        ({"initial": 0.1, "depth": 1.0}, "depth"),
        ({"initial": 0, "depth": 0.5, "adaptive": True}, "either"),
    ],
)
def test_settings_of_beta_that_cannot_be_are_refused(wrong: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BetaSettings(**wrong)
