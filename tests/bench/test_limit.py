"""The most that leaving early can give, by hand."""

import pytest

from nvium_core import EngineConfig
from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Race
from nvium_core.bench.limit import MAX_FITTED_ROWS, TokenCosts, limit, measured_costs, share_of_gain
from nvium_core.engine.schedule.costs import StepCosts
from tests.bench.tiny import tiny_subject
from tests.engine.device.graphs.engines import graphs_engine
from tests.random_models import random_model


def test_the_limit_is_what_the_formula_says() -> None:
    # dense: 4·(3 + 0.5) + 1 = 15; early: 3·(1 + .85 + .6 + .25) + 4·0.5 + 1 = 11.1
    assert limit([3.0] * 4, [0.5] * 4, 1.0, [0.15, 0.25, 0.35, 0.25]) == pytest.approx(15 / 11.1)


def test_blocks_count_by_what_they_cost() -> None:
    # dense: 1 + 10 = 11; early: 1 + 0.2·10 = 3
    assert limit([1.0, 10.0], [0.0, 0.0], 0.0, [0.8, 0.2]) == pytest.approx(11 / 3)


def test_shares_need_not_add_up() -> None:
    assert limit([1.0, 1.0], [0.0, 0.0], 0.0, [4, 1]) == pytest.approx(2 / 1.2)


def test_nothing_is_saved_where_all_go_deep_or_rows_are_all_that_costs() -> None:
    assert limit([1.0, 1.0], [0.1, 0.1], 0.3, [0.0, 1.0]) == 1
    assert limit([0.0, 0.0], [0.1, 0.1], 0.3, [0.9, 0.1]) == 1


def test_the_share_is_of_what_can_be_gained() -> None:
    assert share_of_gain(1.2, 1.4) == pytest.approx(0.5)
    assert share_of_gain(1.0, 1.4) == 0
    assert share_of_gain(1.1, 1.0) is None


def test_a_junction_is_part_of_its_block_or_paid_in_any_case() -> None:
    costs = TokenCosts(blocks=StepCosts.linear([3.0, 3.0], [0.5, 0.5]), junction=1.0, head=2.0)
    # as part of it, dense: 2·(4 + .5) + 2 = 11; early: 4·1.25 + 1 + 2 = 8
    assert costs.limit([0.75, 0.25]) == pytest.approx(11 / 8)
    assert costs.seconds([0.75, 0.25]) == pytest.approx(8)
    # paid, dense: 2·3.5 + 1.25 + 2 = 10.25; early: 3·1.25 + 1 + 1.25 + 2 = 8
    assert costs.limit_with_junctions_paid([0.75, 0.25]) == pytest.approx(10.25 / 8)


def test_many_rows_do_not_bend_the_fit_of_few() -> None:
    few = {1: 1.1, 2: 1.2, 4: 1.4, MAX_FITTED_ROWS: 1.8}
    costs = TokenCosts(blocks=StepCosts({0: few | {64: 90.0}, 1: few}), junction=0.0, head=0.0)
    assert costs.limit([0.5, 0.5]) == pytest.approx((2 * 1.1) / (1.5 + 0.2))


def test_what_graphs_hide_in_a_pass_is_measured_by_itself() -> None:
    """Their routers and heads count as layers."""
    engine = graphs_engine(random_model([1, 2, 4]), EngineConfig(max_sequences=3))
    engine.calibrate()
    costs = measured_costs(engine, [1], 4)
    assert costs.junction > 0 < costs.head


def test_what_is_measured_is_positive() -> None:
    subject = tiny_subject()
    race = Race(prompt=subject.prompt, num_sequences=2, num_tokens=8)
    engine = own.engine_for(subject.model, race)
    engine.calibrate()
    costs = measured_costs(engine, race.prompt, race.num_tokens)
    assert costs.junction > 0 < costs.head
    assert costs.limit([0.5, 0.25, 0.25]) > 1
