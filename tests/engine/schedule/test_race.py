import math
from random import Random

import pytest

from nvium_core.engine.schedule.race import Race


def run(race: Race[str], speeds: dict[str, float], num_tokens: int, *, noise: float = 0.0, size: int = 1) -> list[str]:
    """Run Steps of eight tokens per sequence. Return the way of each Step."""
    random, ways = Random(0), list[str]()
    for _ in range(num_tokens // 8):
        way = race.choose(size)
        ways.append(way)
        race.observe(size, 8 * size, 8 * size / speeds[way] * math.exp(random.gauss(0, noise)))
    return ways


@pytest.mark.parametrize(("speed", "best"), [(1.2, "sweep"), (0.8, "whole")])
def test_the_faster_way_is_nearly_always_chosen(speed, best):
    ways = run(Race(["whole", "sweep"]), {"whole": 1.0, "sweep": speed}, 40_000, noise=0.1)
    assert ways[-2000:].count(best) > 1900
    assert {*ways} == {"whole", "sweep"}


@pytest.mark.parametrize(
    ("speeds", "winner"),
    [
        ({"whole": 1.0, "sweep": 1.0}, "whole"),
        ({"none": 1.0, "few": 1.1, "many": 1.3}, "many"),
        ({"whole": 1.0}, "whole"),
    ],
)
def test_the_fastest_of_one_to_three_ways_wins_and_the_first_of_equals(speeds, winner):
    race = Race([*speeds])
    assert {*run(race, speeds, 20_000, noise=0.1)} == {*speeds}
    assert race.winner(1) == winner


def test_each_number_of_sequences_has_its_own_winner_which_changes_with_the_speeds():
    race = Race(["whole", "sweep"])
    run(race, {"whole": 1.0, "sweep": 1.3}, 100_000)
    assert race.winner(1) == "sweep"
    assert race.ratio == pytest.approx(1.3)
    run(race, {"whole": 1.0, "sweep": 0.7}, 400_000)
    assert race.winner(1) == "whole"
    run(race, {"whole": 1.0, "sweep": 1.3}, 10_000, size=8)
    assert (race.winner(1), race.winner(8)) == ("whole", "sweep")


def test_a_saved_winner_is_used_until_measurements_disagree():
    before = Race(["whole", "sweep"])
    run(before, {"whole": 1.0, "sweep": 1.3}, 20_000)
    after = Race(["whole", "sweep"])
    after.remember(before.as_dict())
    assert after.choose(1) == "sweep"
    run(after, {"whole": 1.0, "sweep": 0.7}, 20_000)
    assert after.winner(1) == "whole"


@pytest.mark.parametrize(
    "saved", [{"1": {}}, {"1": {"means": [0], "variances": [0]}}, {"x": {"means": "", "variances": ""}}]
)
def test_a_damaged_save_is_refused(saved):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Race(["whole", "sweep"]).remember(saved)


def test_a_round_completes_although_the_number_of_sequences_keeps_changing():
    race = Race(["whole", "sweep"])
    for _ in range(200):
        run(race, {"whole": 1.0, "sweep": 0.7}, 64, size=8)
        run(race, {"whole": 1.0, "sweep": 1.3}, 8)
    assert race.winner(8) == "whole"
    assert race.as_dict()["4"]["means"][1] < 0
