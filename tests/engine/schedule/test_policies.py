"""Which block next: solved tables against every policy there is, thresholds against tables, and who solves when."""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies, exit_probabilities
from nvium_core.engine.schedule.policies import Optimal, Policy, Sweep, Synchronous
from nvium_core.engine.schedule.policies.background import SHARE, Background
from nvium_core.engine.schedule.policies.optimal import MAX_SOLVED_SEQUENCES, MAX_TRANSITIONS, Table, solved
from nvium_core.engine.schedule.policies.problem import Problem
from nvium_core.engine.schedule.policies.semi_markov import num_transitions, rate_of, solve, states
from nvium_core.engine.schedule.policies.threshold import Threshold
from nvium_core.engine.schedule.policies.tuning import _choose, _rates, tune

PAPER, SHALLOW = (0.146, 0.26, 0.345, 0.247), (0.4, 0.3, 0.2, 0.1)
LOADS = (1, 2, 4, 8, 16)
OVER_DENSE = {
    PAPER: {"sweep": (1.48, 1.23, 1.09, 1.03, 1.00), "optimal": (1.48, 1.26, 1.13, 1.07, 1.04)},
    SHALLOW: {"sweep": (2.00, 1.58, 1.30, 1.14, 1.05), "optimal": (2.00, 1.59, 1.40, 1.28, 1.22)},
}
"""Tokens per second over the dense schedule's, every block costing the same for any number of rows."""

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


def same_cost(routing: Sequence[float]) -> Problem:
    return Problem.of(StepCosts.linear([1] * len(routing), [0] * len(routing)), exit_probabilities(routing))


def random_problem(seed: int, num_blocks: int) -> Problem:
    """Any routing; costs that are flat for few rows and rise for many."""
    rng = random.Random(seed)
    fixed = [rng.uniform(0.5, 2) for _ in range(num_blocks)]
    costs = {k: {1: a, 8: a * rng.uniform(1, 1.2), 64: a * rng.uniform(1.5, 6)} for k, a in enumerate(fixed)}
    return Problem.of(StepCosts(costs), exit_probabilities([rng.random() + 0.05 for _ in range(num_blocks)]))


class Fixed(Policy):
    """Whatever one says, state by state."""

    def __init__(self, blocks: dict[tuple[int, ...], int]) -> None:
        self.blocks = blocks

    def choose(self, num_waiting: Sequence[int]) -> int:
        return self.blocks[tuple(num_waiting)]


@pytest.mark.parametrize("routing", OVER_DENSE)
@pytest.mark.parametrize(("num_sequences", "place"), [(n, place) for place, n in enumerate(LOADS)])
def test_the_gain_falls_with_the_number_of_sequences(
    routing: tuple[float, ...], num_sequences: int, place: int
) -> None:
    problem, dense = same_cost(routing), num_sequences / 4
    assert solve(problem, num_sequences).rate / dense == pytest.approx(OVER_DENSE[routing]["optimal"][place], rel=0.01)
    if num_sequences < 16:
        sweep = rate_of(Sweep(), problem, num_sequences)
        assert sweep / dense == pytest.approx(OVER_DENSE[routing]["sweep"][place], rel=0.01)


@pytest.mark.parametrize(("num_sequences", "num_blocks"), [(1, 3), (2, 2), (3, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_solution(seed: int, num_sequences: int, num_blocks: int) -> None:
    problem = random_problem(seed, num_blocks)
    every_state = [tuple(state) for state in states(num_sequences, num_blocks).tolist()]
    options = [[block for block, count in enumerate(state) if count] for state in every_state]
    policies = (Fixed(dict(zip(every_state, blocks, strict=True))) for blocks in product(*options))
    best = max(rate_of(policy, problem, num_sequences) for policy in policies)
    assert solve(problem, num_sequences).rate == pytest.approx(best, rel=2e-4)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_the_table_earns_what_the_solution_promises(seed: int, num_blocks: int, num_sequences: int) -> None:
    problem = random_problem(seed, num_blocks)
    promised = solve(problem, num_sequences).rate
    assert rate_of(Table(problem, num_sequences), problem, num_sequences) == pytest.approx(promised, rel=3e-4)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_the_solution_depends_on_no_unit_of_time(seed: int, num_blocks: int, num_sequences: int) -> None:
    problem = random_problem(seed, num_blocks)
    slower = Problem(
        tuple(tuple((rows, 1000 * cost) for rows, cost in block) for block in problem.points),
        problem.exit_probabilities,
        tuple((1000 * fixed, 1000 * each) for fixed, each in problem.junctions),
        (1000 * problem.own[0], 1000 * problem.own[1]),
    )
    assert slower.rounded() == problem.rounded()
    assert 1000 * solve(slower, num_sequences).rate == pytest.approx(solve(problem, num_sequences).rate, rel=1e-3)


def test_every_way_to_spread_sequences_is_a_state_once() -> None:
    found = [tuple(state) for state in states(3, 4).tolist()]
    assert sorted(found) == found == [state for state in product(range(4), repeat=4) if sum(state) == 3]


def test_twelve_blocks_and_blocks_never_reached_are_solved() -> None:
    routing = (0.3, 0.7) + (0.0,) * 10
    assert solve(same_cost(routing), 1).rate == pytest.approx(1 / (0.3 + 0.7 * 2), rel=1e-3)


@pytest.mark.parametrize(
    ("problem", "num_sequences"),
    [
        (same_cost(PAPER), 4),
        (same_cost(PAPER), 8),
        (same_cost(SHALLOW), 4),
        (same_cost(SHALLOW), 8),
        (random_problem(1, 3), 6),
        (random_problem(2, 2), 9),
    ],
)
def test_tuned_thresholds_lose_little(problem: Problem, num_sequences: int) -> None:
    best = solve(problem, num_sequences).rate
    assert rate_of(tune(problem, num_sequences), problem, num_sequences) >= 0.97 * best


@given(st.lists(st.tuples(COUNTS, st.lists(st.integers(1, 6), min_size=4, max_size=4)), min_size=1, max_size=9))
def test_thresholds_choose_alike_one_by_one_and_side_by_side(cases: list[tuple[list[int], list[int]]]) -> None:
    counts = np.array([count + [0] * (4 - len(count)) for count, _ in cases])
    thresholds = np.array([threshold for _, threshold in cases])
    alone = [Threshold(t).choose(c) for c, t in zip(counts.tolist(), thresholds.tolist(), strict=True)]
    assert _choose(counts, thresholds).tolist() == alone


def test_a_threshold_holds_sequences_back_until_there_are_enough() -> None:
    policy = Threshold([1, 2, 3])
    assert [policy.choose(c) for c in ([1, 1, 2], [1, 2, 2], [1, 2, 3], [0, 1, 0])] == [0, 1, 2, 1]


@given(COUNTS, st.integers(0, 100))
@settings(deadline=None)
def test_no_policy_picks_a_block_where_nobody_waits(num_waiting: list[int], seed: int) -> None:
    num_blocks, num_sequences = len(num_waiting), sum(num_waiting)
    costs = StepCosts.linear([1.0] * num_blocks, [0.01] * num_blocks)
    optimal = Optimal(costs, ExitFrequencies.even(num_blocks))
    thresholds = Threshold(random.Random(seed).choices(range(1, 9), k=num_blocks))
    for policy in (Sweep(), Synchronous(), thresholds, Threshold.untuned(num_blocks, num_sequences), optimal):
        assert num_waiting[policy.choose(num_waiting)] > 0


def optimal_for(routing: Sequence[float]) -> Optimal:
    costs = StepCosts.linear([1.0] * len(routing), [0.0] * len(routing))
    return Optimal(costs, ExitFrequencies(exit_probabilities(routing)))


def choices(policy: Policy, num_sequences: int, num_blocks: int) -> list[int]:
    return [policy.choose(state) for state in states(num_sequences, num_blocks).tolist()]


def test_few_sequences_are_solved_where_they_are_asked_for() -> None:
    optimal = optimal_for(SHALLOW)
    solution = solve(same_cost(SHALLOW).rounded(), 4)
    assert choices(optimal, 4, 4) == solution.block_S.tolist()


def test_thresholds_decide_until_the_table_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list[Callable[[], None]]()
    monkeypatch.setattr(Background, "do", lambda _, job: jobs.append(job))
    optimal, first, table = optimal_for(SHALLOW), Threshold.untuned(4, 13), solved(same_cost(SHALLOW).rounded(), 13)
    state = next(s for s in states(13, 4).tolist() if first.choose(s) != table.choose(s))
    assert optimal.choose(state) == first.choose(state)
    for job in jobs:
        job()
    assert choices(optimal, 13, 4) == choices(table, 13, 4)


def test_a_table_can_be_had_at_once() -> None:
    optimal = optimal_for(SHALLOW)
    optimal.solve_now(12)
    assert choices(optimal, 12, 4) == solve(same_cost(SHALLOW).rounded(), 12).block_S.tolist()


def test_too_many_states_for_a_table_are_given_tuned_thresholds() -> None:
    routing = (0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert num_transitions(10, 7) > MAX_TRANSITIONS
    optimal = optimal_for(routing)
    optimal.solve_now(10)
    tuned = tune(same_cost(routing).rounded(), 10)
    for state in ([2, 3, 1, 1, 1, 1, 1], [7, 0, 0, 0, 1, 1, 1], [0, 0, 4, 4, 1, 1, 0]):
        assert optimal.choose(state) == tuned.choose(state)


@pytest.mark.parametrize("num_sequences", [MAX_SOLVED_SEQUENCES + 1, 70])
def test_many_sequences_gather_by_quarters_and_nothing_is_solved(num_sequences: int) -> None:
    optimal = optimal_for(SHALLOW)
    untuned = Threshold.untuned(4, num_sequences)
    for state in ([num_sequences - 12, 4, 4, 4], [num_sequences - 13, 13, 0, 0]):
        assert optimal.choose(state) == untuned.choose(state)
    assert optimal._background.is_idle


@pytest.mark.parametrize("num_sequences", [17, 24, 48])
@pytest.mark.parametrize(("fixed", "per_row"), [(0.2, 0.03), (6.0, 1.0), (0.3, 0.001)])
def test_tuning_gains_many_sequences_next_to_nothing(fixed: float, per_row: float, num_sequences: int) -> None:
    problem = Problem.of(StepCosts.linear([fixed] * 4, [per_row] * 4), exit_probabilities((0.15, 0.25, 0.35, 0.25)))
    thresholds = [Threshold.untuned(4, num_sequences).thresholds, tune(problem, num_sequences).thresholds]
    untuned, tuned = _rates(problem, num_sequences, np.repeat(np.array(thresholds), 32, axis=0)).reshape(2, 32).mean(1)
    assert untuned >= 0.99 * tuned


def test_a_drift_of_the_frequencies_is_noticed_and_solved_anew() -> None:
    optimal = optimal_for(SHALLOW)
    before = choices(optimal, 6, 4)
    for _ in range(600):
        optimal.observe(0, num_rows=8, seconds=1.0, num_asked=8, num_left=0)
    assert sum(optimal.choose(state) == b for state, b in zip(states(6, 4).tolist(), before, strict=True)) > 0
    optimal.wait()
    after = choices(optimal, 6, 4)
    assert after != before
    assert after == choices(solved(Problem.of(optimal.costs, (0.0, 0.5, 2 / 3, 1)).rounded(), 6), 6, 4)


def test_a_drift_of_the_costs_is_noticed_and_a_common_one_is_none() -> None:
    optimal = optimal_for(SHALLOW)
    before = optimal._problem
    for step in range(2048):
        optimal.observe(step % 4, num_rows=1 + step // 4 % 2, seconds=3.0, num_asked=0, num_left=0)
    assert optimal._problem == before
    for _ in range(512):
        optimal.observe(3, num_rows=1, seconds=9.0, num_asked=0, num_left=0)
    assert not optimal._problem.is_near(before)


def test_no_thread_outlives_its_policies() -> None:
    before = set(threading.enumerate())
    crowd = [optimal_for(SHALLOW) for _ in range(20)]
    for optimal in crowd:
        optimal.choose([10, 0, 0, 0])
        optimal.wait()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 20
    del crowd, optimal
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_jobs_take_a_small_share_of_a_core_unless_somebody_waits() -> None:
    background, ended = Background(), []

    def work() -> None:
        started = time.thread_time()
        while time.thread_time() < started + 0.01:
            pass
        ended.append(time.monotonic())

    for _ in range(3):
        background.do(work)
    while len(ended) < 2:
        time.sleep(0.01)
    assert ended[1] - ended[0] >= 0.01 / SHARE
    background.wait()
    assert len(ended) == 3
    assert background.is_idle


def test_a_job_that_fails_is_logged_and_the_others_are_done(caplog: pytest.LogCaptureFixture) -> None:
    background, done = Background(), []

    def fail() -> None:
        raise RuntimeError("unsolvable")

    with caplog.at_level(logging.ERROR):
        for job in (lambda: done.append(1), fail, lambda: done.append(2)):
            background.do(job)
        background.wait()
    assert sorted(done) == [1, 2]
    assert "unsolvable" in caplog.text
