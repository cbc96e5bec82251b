import math
from random import Random

import pytest

from nvium_core.engine.schedule.tuner import Tuner


def run(tuner: Tuner[str], speeds: dict[str, float], num_tokens: int, noise: float = 0, size: int = 1) -> list[str]:
    """Run Steps of eight tokens per sequence. Return the way of each Step."""
    random, ways = Random(0), list[str]()
    for _ in range(num_tokens // 8):
        way = tuner.choose(size)
        ways.append(way)
        tuner.observe(size, 8 * size, 8 * size / speeds[way] * math.exp(random.gauss(0, noise)))
    return ways


@pytest.mark.parametrize(
    ("speeds", "winner"),
    [
        ({"whole": 1.0, "sweep": 1.2}, "sweep"),
        ({"whole": 1.0, "sweep": 0.8}, "whole"),
        ({"whole": 1.0, "sweep": 1.0}, "whole"),
        ({"none": 1.0, "few": 1.1, "many": 1.3}, "many"),
        ({"whole": 1.0}, "whole"),
    ],
)
def test_the_fastest_of_one_to_three_ways_is_mostly_chosen_and_the_first_of_equals(speeds, winner):
    ways = run(Tuner([*speeds]), speeds, 40_000, noise=0.1)
    assert {*ways} == {*speeds}
    assert ways[-2000:].count(winner) > 1400


def test_each_number_of_sequences_has_its_own_winner_which_changes_with_the_speeds():
    tuner = Tuner(["whole", "sweep"])
    assert run(tuner, {"whole": 1.0, "sweep": 1.3}, 100_000).count("sweep") > 12_000
    assert tuner.ratio == pytest.approx(1.3)
    assert run(tuner, {"whole": 1.0, "sweep": 0.7}, 400_000)[-12_500:].count("whole") > 12_000
    assert run(tuner, {"whole": 1.0, "sweep": 1.3}, 10_000, size=8)[-600:].count("sweep") > 500
    assert math.isclose(tuner.ratio, 1.3)


def test_a_window_completes_although_the_number_of_sequences_changes_before_its_end():
    tuner = Tuner(["whole", "sweep"])
    for _ in range(400):
        run(tuner, {"whole": 1.0, "sweep": 1.3}, 16, size=8)
        run(tuner, {"whole": 1.0, "sweep": 0.7}, 8)
    assert run(tuner, {"whole": 1.0, "sweep": 1.3}, 64, size=8) == ["sweep"] * 8
    assert tuner.ratio == pytest.approx(1.3)


@pytest.mark.parametrize(("speeds", "guess"), [({"whole": 1.0, "sweep": 0.75}, 0), ({"whole": 1.0, "sweep": 1.4}, 1)])
def test_measuring_costs_the_first_users_at_most_three_percent(speeds, guess):
    tuner, best = Tuner([*speeds], lambda num_sequences: guess), max(speeds.values())
    ways = run(tuner, speeds, 8000, noise=0.1, size=4)
    for num_steps in (32, 64, 125, 250, 500, 1000):
        assert num_steps / sum(best / speeds[way] for way in ways[:num_steps]) > 0.97
    assert 250 / sum(best / speeds[way] for way in ways[-250:]) > 0.98


def test_a_size_begins_with_the_winner_of_the_next_measured_size():
    tuner = Tuner(["whole", "sweep"])
    assert run(tuner, {"whole": 1.0, "sweep": 1.3}, 64, size=4) == ["whole"] * 8
    run(tuner, {"whole": 1.0, "sweep": 1.3}, 4000, size=8)
    assert run(tuner, {"whole": 1.0, "sweep": 1.3}, 64, size=20) == ["sweep"] * 8
    assert run(tuner, {"whole": 1.0, "sweep": 1.3}, 64, size=64) == ["whole"] * 8
