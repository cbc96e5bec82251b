"""What Steps cost and how often tokens leave, as running averages."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import InvalidRequest
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies, exit_probabilities, reach_probabilities

SECONDS = st.floats(1e-6, 10)
POINTS = st.dictionaries(st.integers(1, 512), SECONDS, min_size=1, max_size=7)
JUNCTIONS = st.tuples(st.floats(0, 1), st.floats(0, 1))
COSTS = st.lists(st.tuples(POINTS, JUNCTIONS), min_size=1, max_size=4).map(
    lambda blocks: StepCosts(dict(enumerate(points for points, _ in blocks)), [line for _, line in blocks])
)
MEASURED = {0: {1: 1.0, 4: 1.2, 16: 3.0}, 1: {1: 2.0, 16: 2.0}}


@given(COSTS)
def test_measured_points_are_given_back(costs: StepCosts) -> None:
    for block, points in costs.points.items():
        for rows, seconds in points.items():
            assert costs.seconds(block, rows) == pytest.approx(seconds)


@given(COSTS)
def test_between_two_points_the_cost_is_on_their_line(costs: StepCosts) -> None:
    for block, points in costs.points.items():
        for (r0, t0), (r1, t1) in pairwise(sorted(points.items())):
            assert costs.seconds(block, r0 + 0.25 * (r1 - r0)) == pytest.approx(0.75 * t0 + 0.25 * t1)


@given(COSTS, st.floats(1, 4096))
def test_no_number_of_rows_is_free(costs: StepCosts, rows: float) -> None:
    assert all(costs.seconds(block, rows) > 0 for block in range(costs.num_blocks))


@given(st.floats(1e-5, 1), st.floats(1e-7, 0.1), st.floats(1, 1000))
def test_a_straight_line_is_continued_and_fitted(fixed: float, per_row: float, rows: float) -> None:
    costs = StepCosts({0: {rows: fixed + per_row * rows for rows in (2, 8, 32)}})
    assert costs.seconds(0, rows) == pytest.approx(fixed + per_row * rows, rel=1e-6)
    assert costs.fixed[0] + costs.per_row[0] * rows == pytest.approx(fixed + per_row * rows, rel=1e-4)


@given(COSTS)
def test_the_fit_is_never_negative_and_no_worse_than_a_constant(costs: StepCosts) -> None:
    for block, points in costs.points.items():
        fixed, per_row = costs.fixed[block], costs.per_row[block]
        assert fixed >= 0 and per_row >= 0
        error = sum((fixed / t + per_row * rows / t - 1) ** 2 for rows, t in points.items())
        constant = sum(1 / t for t in points.values()) / sum(1 / t**2 for t in points.values())
        assert error <= sum((constant / t - 1) ** 2 for t in points.values()) + 1e-6


@given(COSTS)
def test_costs_survive_json(costs: StepCosts) -> None:
    costs = costs.with_own((0.25, 0.125))
    again = StepCosts.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert (again.points, again.junctions, again.own) == (costs.points, costs.junctions, costs.own)


def test_costs_that_were_saved_with_blocks_alone_have_all_else_free() -> None:
    costs = StepCosts.from_dict({"blocks": [{"1": 0.5}]})
    assert (costs.junctions, costs.own) == ([(0.0, 0.0)], (0.0, 0.0))


def test_a_junction_is_paid_where_fronts_are_asked() -> None:
    costs = StepCosts(MEASURED, [(0.5, 0.25), (0.0, 0.0)])
    assert costs.seconds(0, 4) == pytest.approx(1.2)
    assert costs.seconds(0, 4, 1) == pytest.approx(1.2 + 0.75)
    assert costs.seconds(0, 4, 3) == pytest.approx(1.2 + 1.25)
    assert costs.seconds(1, 16, 3) == 2.0


def test_the_engine_s_own_time_is_paid_for_every_step_but_those_that_follow_another() -> None:
    costs = StepCosts(MEASURED, [(0.5, 0.25), (0.0, 0.0)]).with_own((0.1, 0.01))
    assert costs.seconds(0, 4) == pytest.approx(1.3)
    assert costs.seconds(0, 4, 2) == pytest.approx(1.3 + 1.0 + 0.02)
    assert costs.seconds_following(0, 4, 2) == pytest.approx(1.2 + 1.0)


@given(COSTS, st.integers(1, 64), st.integers(0, 8))
def test_what_is_observed_as_it_was_expected_moves_nothing(costs: StepCosts, rows: int, fronts: int) -> None:
    costs = costs.with_own((0.3, 0.01))
    before = costs.points
    costs.observe(0, rows, fronts, costs.seconds(0, rows, fronts))
    assert all(costs.points[0][r] == pytest.approx(t) for r, t in before[0].items())


def test_a_copy_learns_by_itself() -> None:
    costs = StepCosts(MEASURED, own=(0.5, 0.0))
    learning = costs.copy()
    learning.observe(0, 1, 0, 9.0)
    assert (costs.points, learning.own) == (MEASURED, (0.5, 0.0))
    assert learning.points != costs.points


@pytest.mark.parametrize("own", [(-1.0, 0.0), (0.0, float("inf"))])
def test_own_time_that_cannot_be_is_refused(own: tuple[float, float]) -> None:
    with pytest.raises(InvalidRequest, match="costs: the engine's own"):
        StepCosts(MEASURED, own=own)


@pytest.mark.parametrize("junctions", [[], [(0.0, 0.0)], [(0.0, 0.0), (-1.0, 0.0)], [(0.0, float("nan"))] * 2])
def test_junctions_that_cannot_be_are_refused(junctions: list[tuple[float, float]]) -> None:
    with pytest.raises(InvalidRequest, match="costs: junctions"):
        StepCosts(MEASURED, junctions)


@pytest.mark.parametrize("saved", [{}, {"blocks": []}, {"blocks": [{"few": 1}]}, {"blocks": 3}, [], {"blocks": [[1]]}])
def test_a_file_of_something_else_is_refused(saved: object) -> None:
    with pytest.raises(InvalidRequest, match="costs"):
        StepCosts.from_dict(saved)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "points", [{}, {1: {1: 1.0}}, {0: {}}, {0: {0: 1.0}}, {0: {1: 0.0}}, {0: {1: -1.0}}, {0: {1: float("nan")}}]
)
def test_costs_that_cannot_be_are_refused(points: dict[int, dict[int, float]]) -> None:
    with pytest.raises(InvalidRequest, match="costs"):
        StepCosts(points)


def test_what_is_observed_for_long_is_believed() -> None:
    costs = StepCosts(MEASURED)
    for _ in range(200):
        costs.observe(0, 4, 0, 2.4)
    assert costs.seconds(0, 4) == pytest.approx(2.4, rel=0.01)
    assert costs.points[0][1] == 1.0
    assert costs.points[1] == MEASURED[1]


def test_an_observation_between_two_points_moves_the_nearer_one_more() -> None:
    costs = StepCosts(MEASURED)
    costs.observe(1, 4, 0, 3.0)
    assert 2.0 < costs.points[1][16] < costs.points[1][1]


@given(COSTS, st.integers(1, 1000), st.sampled_from([0.0, 1e-9, 1e9]))
def test_one_paused_or_mistimed_step_hardly_matters(costs: StepCosts, rows: int, seconds: float) -> None:
    before = costs.points
    costs.observe(0, rows, 0, seconds)
    for rows_, cost in costs.points[0].items():
        assert cost == pytest.approx(before[0][rows_], rel=0.04)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12))
def test_exit_and_reach_probabilities_give_the_routing_back(weights: list[float]) -> None:
    routing = [weight / sum(weights) for weight in weights]
    leaving = exit_probabilities(routing)
    reached = reach_probabilities(leaving)
    assert [w * reach for w, reach in zip(leaving, reached, strict=True)] == pytest.approx(routing)
    assert reached == pytest.approx([sum(routing[k:]) for k in range(len(routing))])


def test_where_nothing_arrives_all_would_leave() -> None:
    assert exit_probabilities([0.5, 0.5, 0, 0]) == (0.5, 1, 1, 1)


def test_without_any_observation_every_exit_speaks_equally_often() -> None:
    assert ExitFrequencies.even(4).exit_probabilities == pytest.approx((1 / 4, 1 / 3, 1 / 2, 1))


def test_frequencies_follow_what_is_seen_and_forget_what_was() -> None:
    frequencies = ExitFrequencies.even(3)
    for _ in range(500):
        frequencies.observe(0, 8, 2)
    assert frequencies.exit_probabilities == pytest.approx((0.25, 0.5, 1), abs=0.01)
    for _ in range(1000):
        frequencies.observe(0, 8, 6)
    assert frequencies.exit_probabilities[0] == pytest.approx(0.75, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1)), max_size=50))
def test_frequencies_stay_probabilities(seen: list[tuple[int, float]]) -> None:
    frequencies = ExitFrequencies.even(2)
    for num_asked, share in seen:
        frequencies.observe(0, num_asked, round(num_asked * share))
    assert 0 <= frequencies.exit_probabilities[0] <= 1
    assert frequencies.exit_probabilities[1] == 1
