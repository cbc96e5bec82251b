"""Who drafts is found out by drafting."""

from random import Random

import pytest

from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.drafting import LOOK_EVERY, Drafting
from nvium_core.engine.schedule.sequence import DRAFTER

COSTS = StepCosts.linear([1.0] * 4, [0.02] * 4)


def after(drafting: Drafting, num_rounds: int, right: dict[int, float]) -> list[tuple[int, int]]:
    """The plans of rounds in which drafts are right with these probabilities."""
    random, plans = Random(0), list[tuple[int, int]]()
    for _ in range(num_rounds):
        block, most = drafting.plan(1)
        plans.append((block, most))
        drafts = [random.random() < right[block] for _ in range(most)]
        drafting.observe(block, most, drafts.index(False) if False in drafts else most)
    return plans


@pytest.mark.parametrize("best", [DRAFTER, 0, 1])
def test_who_is_right_most_often_is_found_though_nobody_expects_it(best: int) -> None:
    drafting = Drafting(COSTS, has_drafter=True)
    right = dict.fromkeys((DRAFTER, 0, 1, 2), 0.02) | {best: 0.95}
    plans = after(drafting, 40 * LOOK_EVERY, right)
    assert [block for block, most in plans[-LOOK_EVERY // 2 :] if most > 1].count(best) > LOOK_EVERY // 3


def test_where_no_draft_is_right_few_are_made() -> None:
    drafting = Drafting(COSTS, has_drafter=True)
    plans = after(drafting, 40 * LOOK_EVERY, dict.fromkeys((DRAFTER, 0, 1, 2), 0.0))
    assert sum(most for _, most in plans[-10 * LOOK_EVERY :]) <= 10
    assert {block for block, most in plans[-10 * LOOK_EVERY :] if most} == {
        DRAFTER,
        0,
        1,
        2,
    }  # each is looked at in turn


def test_the_drafter_runs_no_block_for_a_draft() -> None:
    drafting = Drafting(COSTS, has_drafter=True)
    drafting._right = dict.fromkeys(drafting._right, 2.0)
    assert drafting.gain(DRAFTER, 1, 1) == pytest.approx(1.25 * 4.08 / 4.16)
    assert drafting.gain(0, 1, 1) == pytest.approx(1.25 * 4.08 / (2 * 1.02 + 3 * 1.04))


def test_without_a_drafter_it_is_not_planned_with() -> None:
    assert {block for block, _ in after(Drafting(COSTS), 10 * LOOK_EVERY, {0: 0.5, 1: 0.5, 2: 0.5})} <= {0, 1, 2}
