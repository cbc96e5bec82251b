"""The simulator against exact rates, and what it measures against what can be said beforehand."""

from dataclasses import replace

import pytest

from nvium_core import InvalidRequest
from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies, exit_probabilities, reach_probabilities
from nvium_core.engine.schedule.policies import Optimal, Policy, Sweep, Synchronous
from nvium_core.engine.schedule.policies.semi_markov import rate_of
from nvium_core.engine.schedule.policies.threshold import Threshold
from nvium_core.planning.machine import Machine
from nvium_core.planning.plan import policies
from nvium_core.planning.simulator import TOKENS_PER_SEQUENCE, simulate

PAPER, SHALLOW = (0.146, 0.26, 0.345, 0.247), (0.4, 0.3, 0.2, 0.1)
OVER_DENSE = {
    (PAPER, 1): (1.48, 1.48, 1.48),
    (PAPER, 4): (1.09, 1.12, 1.13),
    (PAPER, 16): (1.00, 1.04, 1.04),
    (SHALLOW, 1): (2.00, 2.00, 2.00),
    (SHALLOW, 4): (1.30, 1.38, 1.40),
    (SHALLOW, 16): (1.05, 1.19, 1.22),
}
"""Deepest first, best threshold per block, optimal: tokens per second over the dense schedule's."""


def machine_of(routing: tuple[float, ...], num_sequences: int, fixed: float = 1.0, per_row: float = 0.0) -> Machine:
    costs = StepCosts.linear([fixed] * len(routing), [per_row] * len(routing))
    return Machine(routing=routing, costs=costs, config=EngineConfig(max_sequences=num_sequences))


@pytest.mark.parametrize(("routing", "num_sequences"), OVER_DENSE)
def test_the_schedules_gain_what_theory_says(routing: tuple[float, ...], num_sequences: int) -> None:
    machine = machine_of(routing, num_sequences)
    by_name, dense = policies(machine), num_sequences / 4
    found = [simulate(machine, by_name[name], num_tokens=20_000) for name in ("sweep", "threshold", "optimal")]
    gains = [figures.tokens_per_second / dense for figures in found]
    best = OVER_DENSE[routing, num_sequences]
    assert gains[0] == pytest.approx(best[0], rel=0.01)
    assert gains[1] >= 0.97 * best[1], "thresholds are tuned by simulation, so not to the last percent"
    assert gains[2] == pytest.approx(best[2], rel=0.01)


@pytest.mark.parametrize("per_row", [0.0, 0.1])
@pytest.mark.parametrize("policy", [Sweep(), Threshold([1, 2, 2, 1])])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_simulated_and_exact_rates_agree(policy: Policy, num_sequences: int, per_row: float) -> None:
    machine = machine_of(SHALLOW, num_sequences, per_row=per_row)
    expected = rate_of(policy, machine.problem, num_sequences)
    assert simulate(machine, policy, num_tokens=15_000).tokens_per_second == pytest.approx(expected, rel=0.01)


def test_one_sequence_goes_as_fast_as_the_formula_for_it() -> None:
    machine = replace(machine_of(PAPER, 1, per_row=0.05), http_token_seconds=0.3)
    per_token = sum(reach_probabilities(machine.exit_probabilities)) + 4 * 0.05 + 0.3
    assert simulate(machine, Sweep(), num_tokens=15_000).tokens_per_second == pytest.approx(1 / per_token, rel=0.01)


def test_the_dense_schedule_moves_everyone_together() -> None:
    figures = simulate(machine_of(PAPER, 5, per_row=0.1), Synchronous(), num_tokens=3000)
    assert figures.tokens_per_second == pytest.approx(5 / (4 * 1.5), rel=0.01)
    assert figures.p99_wait_steps == 0
    assert figures.max_gap_seconds == pytest.approx(7 * 1.5)


def test_sequences_may_end_in_the_middle_of_a_pass_that_others_go_on_with() -> None:
    figures = simulate(machine_of(SHALLOW, 3), Synchronous(), num_tokens=4 * TOKENS_PER_SEQUENCE)
    assert figures.tokens_per_second == pytest.approx(3 / 4, rel=0.02)


def test_a_pass_takes_what_passes_were_measured_to_take() -> None:
    machine = machine_of(SHALLOW, 4)
    costs = StepCosts(machine.costs.points, passes={1: 1.0, 4: 2.0})
    for schedule in ("synchronous", "optimal"):
        quick = replace(machine, costs=costs)
        rate = simulate(quick, quick.policy(schedule), num_tokens=2000).tokens_per_second
        assert rate == pytest.approx(4 / 2.0, rel=0.03)


def test_the_same_seed_gives_the_same_figures() -> None:
    machine = machine_of(SHALLOW, 3)
    first, second, other = (simulate(machine, Sweep(), num_tokens=500, seed=seed) for seed in (1, 1, 2))
    assert first == second != other


def with_bound(machine: Machine, max_wait_steps: int) -> Machine:
    return replace(machine, config=replace(machine.config, max_wait_steps=max_wait_steps))


@pytest.mark.parametrize("bound", [4, 9])
def test_nobody_waits_longer_than_the_bound_but_for_others_who_did(bound: int) -> None:
    machine, starving = machine_of(SHALLOW, 6), Threshold([1, 6, 6, 6])
    bounded, unbounded = (
        simulate(with_bound(machine, steps), starving, num_tokens=3000).max_wait_steps for steps in (bound, 1000)
    )
    assert bounded <= bound + 3 < unbounded


def test_the_engine_s_bound_on_waiting_costs_next_to_nothing() -> None:
    machine = machine_of(SHALLOW, 8)
    bounded, unbounded = (
        simulate(each, each.policy("optimal"), num_tokens=8000).tokens_per_second
        for each in (machine, with_bound(machine, 10**9))
    )
    assert bounded == pytest.approx(unbounded, rel=0.005)


def test_the_engine_s_policy_learns_the_routing_while_it_serves() -> None:
    machine = machine_of(SHALLOW, 6)
    learning = Optimal(StepCosts(machine.costs.points), ExitFrequencies.even(4))
    known = machine.policy("optimal")
    simulate(machine, learning, num_tokens=8000)  # 2,000 leave frequencies whose noise alone costs 1%
    learning.solve_now(6)
    learnt, best = (simulate(machine, policy, num_tokens=8000).tokens_per_second for policy in (learning, known))
    assert learnt >= 0.99 * best
    assert learning.frequencies.exit_probabilities == pytest.approx(exit_probabilities(SHALLOW), abs=0.08)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"routing": (0.5, 0.4)}, "routing"),
        ({"routing": (1.5, -0.5)}, "routing"),
        ({"routing": (float("nan"), 1.0)}, "routing"),
        ({"routing": ()}, "routing"),
        ({"routing": (0.5, 0.3, 0.2)}, "costs"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        replace(machine_of((0.5, 0.5), 2), **change)  # type: ignore[arg-type]
    assert error.value.field == field
