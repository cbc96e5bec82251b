"""Admission, choice of a Step, preemption: without any model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import EngineConfig, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step

CONTEXT = 20


def scheduler_with(
    schedule: Schedule = "sweep",
    num_blocks: int = 3,
    num_pages: int = 40,
    max_sequences: int = 8,
    max_rows: int = 100,
    **settings: int,
) -> Scheduler:
    pool = PagePool(num_pages, page_size=2)
    limits = {"max_sequences": max_sequences, "max_rows_per_step": max_rows}
    config = EngineConfig(schedule=schedule, **limits, **settings)  # type: ignore[arg-type]
    return Scheduler(pool, config, num_blocks=num_blocks)


def newcomer(scheduler: Scheduler, arrival: int, num_tokens: int, tenant: str = "") -> Sequence:
    sequence = Sequence(
        str(arrival),
        [0] * num_tokens,
        SamplingParams(),
        seed=0,
        num_blocks=scheduler.num_blocks,
        arrival=arrival,
        tenant=tenant,
    )
    scheduler.add(sequence)
    return sequence


def carry_out(step: Step, exiting: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Advance everything; the named sequences emit behind the first block that their front passes."""
    for run in step.runs:
        sequence = run.sequence
        for block in step.blocks:
            asked = run.reaches_front and sequence.filled[block] < run.stop
            sequence.filled[block] = max(sequence.filled[block], run.stop)
            if asked and sequence.id in exiting and not step.whole:
                break
        if run.reaches_front and sequence.id in exiting:
            sequence.append(0)


def num_rows(step: Step) -> int:
    """Of its first block."""
    return sum(max(0, run.stop - run.sequence.filled[step.blocks[0]]) for run in step.runs)


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def test_deferred_rows_ride_along_when_their_block_is_run_again() -> None:
    scheduler = scheduler_with()
    lone = newcomer(scheduler, 0, 5)
    carry_out(next_step(scheduler), exiting={"0"})
    assert lone.filled == [5, 0, 0]
    carry_out(next_step(scheduler))
    assert lone.filled == [6, 6, 6]


def test_the_whole_schedule_finishes_a_row_before_the_next_token_begins() -> None:
    scheduler = scheduler_with("whole")
    newcomer(scheduler, 0, 5)
    for stop in (5, 6):
        step = next_step(scheduler)
        assert (step.blocks, step.whole, [run.stop for run in step.runs]) == (range(3), True, [stop])
        carry_out(step, exiting={"0"})


def test_a_whole_step_takes_no_more_rows_through_any_block_than_it_may() -> None:
    scheduler = scheduler_with("whole", max_rows=4)
    sequence = newcomer(scheduler, 0, 9)
    next_step(scheduler)
    sequence.filled = [9, 9, 2]
    assert [run.stop for run in next_step(scheduler).runs] == [6]


def test_a_lone_sequence_goes_on_until_its_front_emits() -> None:
    scheduler = scheduler_with()
    newcomer(scheduler, 0, 5)
    step = next_step(scheduler)
    assert (step.blocks, step.whole) == (range(3), False)
    newcomer(scheduler, 1, 5)
    assert next_step(scheduler).blocks == range(1)


def test_a_prompt_that_does_not_fit_runs_through_one_block() -> None:
    scheduler = scheduler_with(max_rows=4)
    newcomer(scheduler, 0, 10)
    assert next_step(scheduler).blocks == range(1)


def test_sweep_runs_the_deepest_block_and_everyone_who_waits_there() -> None:
    scheduler = scheduler_with()
    for arrival in range(3):
        newcomer(scheduler, arrival, 2)
    carry_out(next_step(scheduler), exiting={"1"})
    step = next_step(scheduler)
    assert (step.blocks, [run.sequence.id for run in step.runs]) == (range(1, 2), ["0", "2"])


def test_a_long_prompt_is_cut_to_the_row_budget() -> None:
    scheduler = scheduler_with(max_rows=4)
    newcomer(scheduler, 0, 10)
    step = next_step(scheduler)
    assert [run.stop for run in step.runs] == [4]
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
    old, young = newcomer(scheduler, 0, 4), newcomer(scheduler, 1, 2)
    carry_out(next_step(scheduler), exiting={"0", "1"})
    step = next_step(scheduler)
    assert [run.sequence for run in step.runs] == [old]
    assert scheduler.num_preemptions == 1
    assert young.filled == [0, 0, 0]
    assert young.num_tokens == 3
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


@pytest.mark.parametrize("num_steps_between", [0, 1])
@pytest.mark.parametrize(("num_pages", "num_admitted"), [(4, 1), (5, 2)])
def test_a_newcomer_leaves_those_who_run_a_page_each_to_grow_into(
    num_steps_between: int, num_pages: int, num_admitted: int
) -> None:
    scheduler = scheduler_with(num_pages=num_pages)
    newcomer(scheduler, 0, 4)
    for _ in range(num_steps_between):
        next_step(scheduler)
    newcomer(scheduler, 1, 4)
    next_step(scheduler)
    assert len(scheduler.running) == num_admitted


def test_a_newcomer_alone_may_take_every_page() -> None:
    scheduler = scheduler_with(num_pages=4)
    newcomer(scheduler, 0, 8)
    assert num_rows(next_step(scheduler)) == 8


def test_nobody_overtakes_one_who_waits_for_pages() -> None:
    scheduler = scheduler_with(num_pages=6)
    newcomer(scheduler, 0, 4)
    newcomer(scheduler, 1, 10)
    newcomer(scheduler, 2, 1)
    next_step(scheduler)
    assert [sequence.id for sequence in scheduler.running] == ["0"]


def test_choices_that_wait_for_their_leader_hold_up_nobody_behind_them() -> None:
    scheduler = scheduler_with()
    choices = [newcomer(scheduler, arrival, 9) for arrival in range(3)]
    for sequence in choices:
        sequence.siblings = choices
    newcomer(scheduler, 3, 2)
    carry_out(next_step(scheduler))
    assert [sequence.id for sequence in scheduler.running] == ["0", "3"]
    scheduler.remove(choices[0])
    next_step(scheduler)
    assert [sequence.id for sequence in scheduler.running] == ["1", "3"]


def test_tenants_take_turns_for_a_seat() -> None:
    scheduler = scheduler_with(max_sequences=1)
    for arrival, tenant in enumerate(["a", "a", "a", "b", "b", "c"]):
        newcomer(scheduler, arrival, 2, tenant)
    order = []
    while scheduler.schedule() is not None:
        order += [sequence.id for sequence in scheduler.admitted]
        scheduler.remove(scheduler.running[0])
    assert order == ["0", "3", "5", "1", "4", "2"]


def test_a_preempted_sequence_goes_before_the_tenant_whose_turn_it_is() -> None:
    scheduler = scheduler_with(num_pages=4)
    newcomer(scheduler, 0, 4, "a")
    young = newcomer(scheduler, 1, 2, "a")
    carry_out(next_step(scheduler), exiting={"0", "1"})
    newcomer(scheduler, 2, 1, "b")
    next_step(scheduler)
    assert scheduler.waiting.first(lambda _: False) is young


def test_choices_that_wait_for_their_leader_hold_up_no_other_tenant() -> None:
    scheduler = scheduler_with()
    choices = [newcomer(scheduler, arrival, 9, "a") for arrival in range(3)]
    for sequence in choices:
        sequence.siblings = choices
    newcomer(scheduler, 3, 2, "b")
    newcomer(scheduler, 4, 2, "b")
    newcomer(scheduler, 5, 2, "a")
    carry_out(next_step(scheduler))
    assert [sequence.id for sequence in scheduler.admitted] == ["0", "3", "5", "4"]


def test_the_scheduler_says_whom_it_let_in_and_what_of_their_prompts_was_found() -> None:
    scheduler = scheduler_with("sweep", num_blocks=1)
    first = newcomer(scheduler, 0, 7)
    assert first.num_cached_prompt_tokens is None
    step = next_step(scheduler)
    assert (scheduler.admitted, first.num_cached_prompt_tokens) == ([first], 0)
    carry_out(step, exiting={"0"})
    scheduler.pool.publish(first, since=0)
    second = newcomer(scheduler, 1, 7)
    step = next_step(scheduler)
    assert (scheduler.admitted, second.num_cached_prompt_tokens) == ([second], 6)
    carry_out(step, exiting={"0", "1"})
    assert next_step(scheduler) and scheduler.admitted == []


def test_what_is_found_after_a_preemption_is_not_of_the_prompt() -> None:
    scheduler = scheduler_with("sweep", num_blocks=1)
    sequence = newcomer(scheduler, 0, 3)
    for _ in range(3):
        carry_out(next_step(scheduler), exiting={"0"})
    scheduler.pool.publish(sequence, since=0)
    scheduler.preempt(sequence)
    next_step(scheduler)
    assert scheduler.admitted == [sequence]
    assert (sequence.filled, sequence.num_cached_prompt_tokens) == ([4], 0)


def test_short_runs_take_turns_with_long_ones_which_share_a_chunk() -> None:
    scheduler = scheduler_with(num_pages=200, chunk_rows=6)
    for arrival, num_tokens in enumerate([50, 40, 3, 2]):
        newcomer(scheduler, arrival, num_tokens)
    turns = []
    for _ in range(3):
        step = next_step(scheduler)
        turns.append([(run.sequence.id, run.stop) for run in step.runs])
        carry_out(step)
    assert turns == [[("0", 6)], [("2", 3), ("3", 2)], [("0", 12)]]


def test_long_runs_alone_may_take_all_rows() -> None:
    scheduler = scheduler_with(num_pages=200, chunk_rows=6)
    newcomer(scheduler, 0, 50)
    newcomer(scheduler, 1, 70)
    assert [run.stop for run in next_step(scheduler).runs] == [50, 50]


def test_several_tokens_a_call_where_nothing_waits_for_them_and_pages_are_there() -> None:
    scheduler = scheduler_with(num_pages=12)
    scheduler.tokens_ahead = 8
    lone = newcomer(scheduler, 0, 5)
    assert next_step(scheduler).runs[0].limit == 8
    assert len(lone.pages) == 6
    newcomer(scheduler, 1, 5)
    carry_out(next_step(scheduler))
    assert {run.limit for run in next_step(scheduler).runs} == {1}


schedules = st.sampled_from(["race", "whole", "sweep"])


@given(
    schedules,
    st.integers(1, 4),
    st.integers(1, 20),
    st.lists(st.integers(1, 60), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_while_some_are_short_long_runs_take_a_chunk_at_most_and_every_other_turn(
    schedule: Schedule, num_blocks: int, chunk_rows: int, prompts: list[int], rng: random.Random
) -> None:
    scheduler = scheduler_with(schedule, num_blocks, num_pages=1000, max_rows=400, chunk_rows=chunk_rows)
    sequences = [newcomer(scheduler, arrival, num_tokens) for arrival, num_tokens in enumerate(prompts)]
    num_without_short = 0
    for _ in range(60):
        step = next_step(scheduler)
        long_runs = [run for run in step.runs if scheduler._is_long(run.sequence)]
        some_are_short = any(not scheduler._is_long(sequence) for sequence in sequences)
        last = step.blocks[-1] if step.whole else step.blocks[0]
        taken = sum(run.stop - run.sequence.filled[last] for run in long_runs)
        assert taken <= (chunk_rows if some_are_short else 400)
        is_without_short = some_are_short and len(long_runs) == len(step.runs)
        num_without_short = num_without_short + 1 if is_without_short else 0
        assert num_without_short <= 1
        speak_at_random(step, num_blocks, rng)


def speak_at_random(step: Step, num_blocks: int, rng: random.Random) -> None:
    is_last = step.blocks[-1] == num_blocks - 1
    carry_out(step, exiting={run.sequence.id for run in step.runs if is_last or rng.random() < 0.4})


@given(
    schedules,
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(4, 100),
    st.integers(1, 20),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_nobody_who_runs_is_passed_over_for_long(
    schedule: Schedule,
    num_blocks: int,
    max_wait_steps: int,
    max_rows: int,
    chunk_rows: int,
    prompts: list[int],
    rng: random.Random,
) -> None:
    settings = {"max_wait_steps": max_wait_steps, "chunk_rows": chunk_rows}
    scheduler = scheduler_with(schedule, num_blocks, num_pages=2000, max_rows=max_rows, **settings)
    waited = {newcomer(scheduler, arrival, num_tokens): 0 for arrival, num_tokens in enumerate(prompts)}
    for _ in range(100):
        step = next_step(scheduler)
        waited = {sequence: steps + 1 for sequence, steps in waited.items()}
        waited |= {run.sequence: 0 for run in step.runs}
        assert max(waited.values()) <= max_wait_steps + len(prompts)
        speak_at_random(step, num_blocks, rng)


@given(
    schedules,
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
        assert num_rows(step) <= max_rows
        assert all(run.stop > run.sequence.filled[step.blocks[-1]] for run in step.runs)
        assert all(scheduler.pool.num_pages_for(run.stop) <= len(run.sequence.pages) for run in step.runs)
        speak_at_random(step, num_blocks, rng)
        for run in step.runs:
            if run.sequence.num_tokens == unfinished[run.sequence.id]:
                del unfinished[run.sequence.id]
                scheduler.remove(run.sequence)
        scheduler.check_integrity()
    assert not unfinished
    assert scheduler.pool.num_free == num_pages
