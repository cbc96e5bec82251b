"""Admission, choice of a Step, preemption: without any model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.kv_cache import PagePool
from nvium_core.engine.policies import POLICIES
from nvium_core.engine.scheduler import Scheduler, Step
from nvium_core.engine.sequence import Sequence

CONTEXT = 20


def scheduler_with(
    schedule: Schedule = "sweep", num_blocks: int = 3, num_pages: int = 40, max_sequences: int = 8, max_rows: int = 100
) -> Scheduler:
    pool = PagePool(num_pages, page_size=2)
    return Scheduler(POLICIES[schedule](), pool, num_blocks=num_blocks, max_sequences=max_sequences, max_rows=max_rows)


def newcomer(scheduler: Scheduler, arrival: int, num_tokens: int) -> Sequence:
    sequence = Sequence(
        str(arrival), [0] * num_tokens, SamplingParams(), seed=0, num_blocks=scheduler.num_blocks, arrival=arrival
    )
    scheduler.add(sequence)
    return sequence


def carry_out(step: Step, exiting: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Advance everything; the named sequences speak if their front was reached."""
    for run in step.runs:
        run.sequence.advance(step.block, run.rows)
        if run.reaches_front and run.sequence.id in exiting:
            run.sequence.append(0)


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def test_deferred_rows_ride_along_when_their_block_is_run_again() -> None:
    scheduler = scheduler_with()
    newcomer(scheduler, 0, 5)
    carry_out(next_step(scheduler), exiting={"0"})
    carry_out(next_step(scheduler))
    step = next_step(scheduler)
    assert (step.block, [run.rows for run in step.runs]) == (1, [range(6)])


def test_the_synchronous_schedule_finishes_a_row_before_the_next_token_begins() -> None:
    scheduler = scheduler_with("synchronous")
    newcomer(scheduler, 0, 5)
    blocks = []
    for _ in range(6):
        step = next_step(scheduler)
        blocks.append((step.block, step.num_rows))
        carry_out(step, exiting={"0"} if step.block in (0, 2) else set())
    assert blocks == [(0, 5), (1, 5), (2, 5), (0, 1), (1, 1), (2, 1)]


def test_sweep_runs_the_deepest_block_and_everyone_who_waits_there() -> None:
    scheduler = scheduler_with()
    for arrival in range(3):
        newcomer(scheduler, arrival, 2)
    carry_out(next_step(scheduler), exiting={"1"})
    step = next_step(scheduler)
    assert (step.block, [run.sequence.id for run in step.runs]) == (1, ["0", "2"])


def test_a_long_prompt_is_cut_to_the_row_budget() -> None:
    scheduler = scheduler_with(max_rows=4)
    newcomer(scheduler, 0, 10)
    step = next_step(scheduler)
    assert [run.rows for run in step.runs] == [range(4)]
    assert not step.runs[0].reaches_front


def test_sequences_beyond_the_limit_wait_their_turn() -> None:
    scheduler = scheduler_with(max_sequences=2)
    sequences = [newcomer(scheduler, arrival, 1) for arrival in range(3)]
    assert len(next_step(scheduler).runs) == 2
    scheduler.remove(sequences[0])
    next_step(scheduler)
    assert [s.id for s in scheduler.running] == ["1", "2"]


def test_the_youngest_is_preempted_when_pages_run_out_and_keeps_its_tokens() -> None:
    scheduler = scheduler_with(num_pages=4)
    old, young = newcomer(scheduler, 0, 4), newcomer(scheduler, 1, 4)
    carry_out(next_step(scheduler), exiting={"0", "1"})
    step = next_step(scheduler)
    assert [run.sequence for run in step.runs] == [old]
    assert scheduler.num_preemptions == 1
    assert young.filled == [0, 0, 0]
    assert young.num_tokens == 5
    assert list(scheduler.waiting) == [young]
    scheduler.check_integrity()


def test_a_seat_taken_twice_or_lost_is_found() -> None:
    scheduler = scheduler_with()
    first, second = newcomer(scheduler, 0, 2), newcomer(scheduler, 1, 2)
    next_step(scheduler)
    scheduler.check_integrity()
    first.seat = second.seat
    with pytest.raises(AssertionError, match="seat"):
        scheduler.check_integrity()


@given(
    st.sampled_from(["sweep", "synchronous"]),
    st.integers(1, 4),
    st.integers(CONTEXT // 2, 30),
    st.integers(1, 5),
    st.integers(1, 30),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_everyone_finishes_whatever_the_limits(
    schedule: Schedule,
    num_blocks: int,
    num_pages: int,
    max_sequences: int,
    max_rows: int,
    prompts: list[int],
    rng: random.Random,
) -> None:
    scheduler = scheduler_with(schedule, num_blocks, num_pages, max_sequences, max_rows)
    unfinished = {newcomer(scheduler, i, length).id: length + 8 for i, length in enumerate(prompts)}
    for _ in range(20_000):
        step = scheduler.schedule()
        if step is None:
            break
        assert 0 < step.num_rows <= max_rows
        for run in step.runs:
            assert run.rows.start == run.sequence.filled[step.block]
            assert scheduler.pool.num_pages_for(run.rows.stop) <= len(run.sequence.pages)
            run.sequence.advance(step.block, run.rows)
            if run.reaches_front and (step.block == num_blocks - 1 or rng.random() < 0.4):
                run.sequence.append(0)
                if run.sequence.num_tokens == unfinished[run.sequence.id]:
                    del unfinished[run.sequence.id]
                    scheduler.remove(run.sequence)
        scheduler.check_integrity()
    assert not unfinished
    assert scheduler.pool.num_free == num_pages
