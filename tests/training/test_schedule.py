import math

import pytest

from nvium_core.training.schedule import DepthSteering, LearningRate, RouterWarmup


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.325, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), (0.55, 0.55), (1.0, 0.1)],
)
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine(progress: float, rate: float) -> None:
    schedule = LearningRate(maximum=2.0, warmup=0.1, final_ratio=0.1)
    assert schedule.at(progress) == pytest.approx(2 * rate)


def test_without_warm_up_the_learning_rate_starts_at_its_maximum() -> None:
    assert LearningRate(maximum=1e-3, warmup=0.0).at(0) == 1e-3


def test_the_papers_warm_up_and_floor_are_the_defaults() -> None:
    schedule = LearningRate(maximum=1.0)
    assert schedule.at(0.01) == 1.0 and schedule.at(1.0) == pytest.approx(0.1)


def test_routers_warm_up_for_the_first_share_of_steps() -> None:
    warmup = RouterWarmup()
    assert [warmup.active(progress) for progress in (0.0, 0.0499, 0.05, 1.0)] == [True, True, False, False]


def test_too_deep_a_model_makes_compute_dearer_and_too_shallow_a_one_cheaper() -> None:
    deep, shallow = DepthSteering(beta=0.1, target=0.5), DepthSteering(beta=0.1, target=0.5)
    deep.observe(0.9)
    shallow.observe(0.2)
    assert deep.beta == pytest.approx(0.1 * math.exp(0.05 * 0.4))
    assert shallow.beta == pytest.approx(0.1 * math.exp(-0.05 * 0.3))


def test_beta_rests_at_the_target() -> None:
    steering = DepthSteering(beta=0.1, target=0.5)
    steering.observe(0.5)
    assert steering.beta == 0.1


@pytest.mark.parametrize(("depth", "bound"), [(1.0, 1.0), (0.0, 1e-3)])
def test_beta_stays_within_its_bounds(depth: float, bound: float) -> None:
    steering = DepthSteering(beta=0.1, target=0.5)
    for _ in range(500):
        steering.observe(depth)
    assert steering.beta == bound


def test_steering_goes_by_the_smoothed_depth() -> None:
    steering = DepthSteering(beta=0.1, target=0.5)
    steering.observe(0.9)
    steering.observe(0.4)
    assert steering.depth == pytest.approx(0.98 * 0.9 + 0.02 * 0.4)
    assert steering.beta > 0.1 * math.exp(0.05 * 0.4)


def test_without_a_target_beta_stays_as_it_is() -> None:
    steering = DepthSteering(beta=0.15)
    steering.observe(1.0)
    assert steering.beta == 0.15 and steering.depth == 1.0
