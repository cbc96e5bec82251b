"""Who drafts is found out by drafting."""

from collections import Counter
from random import Random

import pytest

from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.drafting import LOOK_EVERY, MAX_DRAFTS, Drafting
from nvium_core.engine.schedule.sequence import DRAFTER, LOOKUP

SHARES = 0.25, 0.5, 0.8
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


def test_the_likelier_a_copy_is_right_the_more_is_copied() -> None:
    drafting = Drafting(StepCosts.linear([1.0] * 4, [0.2] * 4))
    numbers = [drafting.num_copied(share, 1) for share in (0.0, 0.1, 0.3, 0.6, 0.8, 0.99)]
    assert numbers[:2] == [0, 0]
    assert 0 < numbers[2] < numbers[3] < numbers[4] < numbers[5] == MAX_DRAFTS


def test_passes_that_were_measured_for_few_do_not_make_rows_free() -> None:
    """As of an engine of one seat."""
    costs = StepCosts({0: {1: 1.0, 2: 1.5, 9: 5.0}}, passes={1: 1.0})
    assert Drafting(costs).num_copied(0.4, 1) == 0
    assert Drafting(costs).num_copied(0.6, 1) == 1


def test_nothing_is_copied_where_the_drafter_is_right_more_often() -> None:
    drafting = Drafting(COSTS, has_drafter=True)
    drafting._right[DRAFTER] = 7.0
    assert drafting.num_copied(5 / 8, 1) == 0
    assert drafting.num_copied(0.99, 1) > 0


def learnt(seconds: dict[int, float], num_sequences: int, times: int = 60) -> Drafting:
    """After rounds of so many rows that took so long."""
    drafting = Drafting(StepCosts({0: {1: 1.0, 100: 1.99}}))  # a row adds a hundredth, it is believed
    for _ in range(times):
        for rows, each in seconds.items():
            drafting.observe_seconds(rows, 0, each, num_sequences)
    return drafting


def test_of_several_sequences_one_copies_where_its_tokens_are_worth_more_than_what_its_rows_take_of_all() -> None:
    """Of four, a row more takes .1 of a round, so .4 of a sequence's share of it."""
    drafting = learnt({rows: 0.6 + 0.1 * rows for rows in range(4, 13)}, num_sequences=4)
    assert drafting.num_copied(0.35, 4) == 0
    assert drafting.num_copied(0.45, 4) == 1
    assert drafting.num_copied(0.8, 4) == 2
    assert Drafting(StepCosts({0: {1: 1.0, 100: 1.99}})).num_copied(0.1, 4) > 0


def test_rounds_of_one_sequence_tell_what_those_of_several_with_as_many_rows_take() -> None:
    drafting = learnt({rows: 0.6 + 0.1 * rows for rows in range(1, 10)}, num_sequences=1)
    assert drafting.num_copied(0.35, 4) == 0
    assert drafting.num_copied(0.45, 4) == 1


@pytest.mark.parametrize("seed", range(5))
def test_rounds_that_others_disturb_change_little(seed: int) -> None:
    """Each fourth takes twice as long; a row of four sequences' takes .4 of a sequence's share, as above."""
    random, drafting = Random(seed), Drafting(StepCosts({0: {1: 1.0, 100: 1.99}}))
    decided = Counter[tuple[float, bool]]()
    for number in range(1000):
        rows = 4 if random.random() < 0.6 else random.randint(5, 12)
        drafting.observe_seconds(rows, 0, (0.6 + 0.1 * rows) * (2 if random.random() < 0.25 else 1), 4)
        drafting._copies.clear()
        if number >= 200:
            decided.update((share, drafting.num_copied(share, 4) > 0) for share in (0.25, 0.6))
    assert decided[0.25, True] < 120 and decided[0.6, True] > 720


@pytest.mark.parametrize("pace", [0.5, 3.0])
def test_a_machine_that_becomes_slower_or_faster_changes_no_decision(pace: float) -> None:
    drafting = learnt({4: 1.0, 5: 1.1, 6: 1.2}, num_sequences=4)
    before = [drafting.num_copied(share, 4) > 0 for share in SHARES]
    for number in range(400):
        drafting.observe_seconds(4, 0, pace, 4)
        if number % 20 == 0:
            drafting.observe_seconds(5, 0, 1.1 * pace, 4)
    drafting._copies.clear()
    assert drafting._seconds(4, 0, 4) == pytest.approx(pace, rel=0.05)
    assert drafting._cost_of_copies(1, 4) == pytest.approx(1.4, rel=0.05)
    assert before == [drafting.num_copied(share, 4) > 0 for share in SHARES] == [False, True, True]


def test_copies_that_seem_too_dear_are_tried_again_now_and_then() -> None:
    """Calibration was disturbed."""
    drafting = Drafting(StepCosts({0: {4: 1.0, 5: 3.0}}))
    copied = list[int]()
    for _ in range(20 * LOOK_EVERY):
        number = drafting.num_copied(0.6, 4)
        copied.append(number)
        drafting.observe_seconds(4 + number, 0, 1.0 + 0.1 * number, 4)
        drafting.observe(LOOKUP, number, 0)
    assert sum(copied[:LOOK_EVERY]) == 1
    assert sum(copied[-LOOK_EVERY:]) > LOOK_EVERY / 2


def test_a_prompt_tells_nothing_about_rounds() -> None:
    drafting = learnt({4: 1.0, 37: 9.0}, num_sequences=4)
    assert drafting._seconds(37, 0, 4) < 2


def test_the_limit_is_that_of_the_rounds_that_were() -> None:
    rounds = Counter({(0, 0): 3, (LOOKUP, 4): 1})
    assert Drafting(COSTS).limit(rounds, 4, 1) == pytest.approx(8 * 4.08 / (3 * 4.08 + 4.4))
