"""Passes that follow one another: nobody is asked again where they stand, until somebody comes or ends."""

from collections.abc import Sequence as Items

import pytest

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.engine.schedule.policies.sweep import Sweep
from nvium_core.engine.schedule.policies.whole_pass import WholePass
from tests.engine.schedule.test_scheduler import carry_out, newcomer, next_step, scheduler_with
from tests.random_models import random_model


class Asked(WholePass):
    """Counts how often a block is chosen."""

    def __init__(self) -> None:
        self.times = 0

    def choose(self, num_waiting: Items[int]) -> int:
        self.times += 1
        return super().choose(num_waiting)


def engine_with(policy: Asked, cache_tokens: int | None = None) -> Engine:
    config = EngineConfig(max_sequences=3, page_size=4, cache_tokens=cache_tokens)
    engine = Engine(random_model([1, 2, 3]), config)
    engine.scheduler.policy = policy
    return engine


def add(engine: Engine, name: str, max_tokens: int) -> None:
    engine.add(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True))


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_pass_after_a_pass_is_not_chosen_anew(logprobs: int | None) -> None:
    engine = engine_with(policy := Asked())
    for number in range(3):
        params = SamplingParams(max_tokens=20, seed=number, ignore_eos=True, logprobs=logprobs)
        engine.add(str(number), [1, 2, 3], params)
    for _ in range(20):
        assert len(engine.step()) == 3
        engine.check_integrity()
    assert policy.times == 1
    engine.check_idle()


def test_who_comes_and_who_ends_is_noticed() -> None:
    engine = engine_with(policy := Asked())
    add(engine, "first", 12)
    add(engine, "second", 4)
    for _ in range(3):
        engine.step()
    add(engine, "third", 3)
    emitted = [len(engine.step()) for _ in range(9)]
    assert emitted[0] >= 1
    assert policy.times < 9
    assert not engine.has_work
    engine.check_idle()


def test_pages_that_run_out_are_taken_from_the_youngest() -> None:
    engine = engine_with(Asked(), cache_tokens=28)
    for number in range(3):
        add(engine, str(number), 9)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.num_preemptions > 0
    engine.check_idle()


class Scored(Sweep):
    passes_scored = True


@pytest.mark.parametrize(("wishes", "num_reports"), [([1, 1], {3}), ([1, None], {1}), ([None, None], {1})])
def test_sequences_that_are_all_scored_pass_whole(wishes: list[int | None], num_reports: set[int]) -> None:
    engine = Engine(random_model([1, 2, 3]), EngineConfig(max_sequences=3))
    engine.scheduler.policy = Scored()
    for number, logprobs in enumerate(wishes):
        engine.add(str(number), [1, 2], SamplingParams(max_tokens=8, seed=number, ignore_eos=True, logprobs=logprobs))
    found = set()
    while len(engine.scheduler.running) != 1 and engine.has_work:
        engine.step()
        found.add(len(engine.reports))
    assert found == num_reports


@pytest.mark.parametrize(("num_pages", "num_each"), [(5, 2), (6, 3), (40, 3)])
def test_the_next_row_s_page_is_taken_early_unless_it_is_promised(num_pages: int, num_each: int) -> None:
    """Two sequences whose pages are full."""
    scheduler = scheduler_with("synchronous", num_pages=num_pages)
    scheduler.grows_early = True
    both = [newcomer(scheduler, number, 4) for number in range(2)]
    carry_out(next_step(scheduler))
    assert scheduler.running == both
    assert [len(sequence.pages) for sequence in both] == [num_each, num_each]
    scheduler.check_integrity()


def test_a_page_is_not_taken_early_for_a_row_that_never_comes() -> None:
    scheduler = scheduler_with("synchronous")
    scheduler.grows_early = True
    sequence = newcomer(scheduler, 0, 4)
    sequence.max_length = 5
    carry_out(next_step(scheduler))
    assert len(sequence.pages) == 2
