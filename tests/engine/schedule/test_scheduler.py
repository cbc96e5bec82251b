"""Admission, the choice of Steps and preemption, without a model."""

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


def newcomer(scheduler: Scheduler, arrival: int, num_tokens: int) -> Sequence:
    tokens, num_blocks = [0] * num_tokens, scheduler.num_blocks
    sequence = Sequence(str(arrival), tokens, SamplingParams(), seed=0, num_blocks=num_blocks, arrival=arrival)
    scheduler.add(sequence)
    return sequence


def carry_out(step: Step, exiting: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Advance all runs. The sequences in `exiting` emit at the first exit that their front row reaches."""
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
    """Count the rows of the Step's first block."""
    return sum(max(0, run.stop - run.sequence.filled[step.blocks[0]]) for run in step.runs)


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def test_deferred_rows_are_computed_with_later_rows_of_their_block() -> None:
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


def test_a_whole_step_respects_the_row_budget_in_every_block() -> None:
    scheduler = scheduler_with("whole", max_rows=4)
    sequence = newcomer(scheduler, 0, 9)
    next_step(scheduler)
    sequence.filled = [9, 9, 2]
    assert [run.stop for run in next_step(scheduler).runs] == [6]


def test_a_lone_sequence_continues_until_its_front_emits() -> None:
    scheduler = scheduler_with()
    newcomer(scheduler, 0, 5)
    step = next_step(scheduler)
    assert (step.blocks, step.whole) == (range(3), False)
    newcomer(scheduler, 1, 5)
    assert next_step(scheduler).blocks == range(1)


def test_sweep_runs_the_deepest_block_with_all_sequences_that_wait_for_it() -> None:
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
    assert (step.blocks, [run.stop for run in step.runs]) == (range(1), [4])
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


def test_a_seat_with_two_owners_is_detected() -> None:
    scheduler = scheduler_with()
    first, second = newcomer(scheduler, 0, 2), newcomer(scheduler, 1, 2)
    next_step(scheduler)
    scheduler.check_integrity()
    first.seat = second.seat
    with pytest.raises(AssertionError, match="seat"):
        scheduler.check_integrity()


@pytest.mark.parametrize("num_steps_between", [0, 1])
@pytest.mark.parametrize(("num_pages", "num_admitted"), [(4, 1), (5, 2)])
def test_admission_leaves_every_running_sequence_a_free_page(
    num_steps_between: int, num_pages: int, num_admitted: int
) -> None:
    scheduler = scheduler_with(num_pages=num_pages)
    newcomer(scheduler, 0, 4)
    for _ in range(num_steps_between):
        next_step(scheduler)
    newcomer(scheduler, 1, 4)
    next_step(scheduler)
    assert len(scheduler.running) == num_admitted


def test_a_lone_sequence_may_take_every_page() -> None:
    scheduler = scheduler_with(num_pages=4)
    newcomer(scheduler, 0, 8)
    assert num_rows(next_step(scheduler)) == 8


def test_no_sequence_overtakes_one_that_waits_for_pages() -> None:
    scheduler = scheduler_with(num_pages=6)
    newcomer(scheduler, 0, 4)
    newcomer(scheduler, 1, 10)
    newcomer(scheduler, 2, 1)
    next_step(scheduler)
    assert [sequence.id for sequence in scheduler.running] == ["0"]


def test_choices_that_wait_for_their_leader_delay_no_other_request() -> None:
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


def test_admitted_sequences_and_their_cached_prompt_tokens_are_reported() -> None:
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


def test_rows_found_after_a_preemption_do_not_count_as_cached_prompt_tokens() -> None:
    scheduler = scheduler_with("sweep", num_blocks=1)
    sequence = newcomer(scheduler, 0, 3)
    for _ in range(3):
        carry_out(next_step(scheduler), exiting={"0"})
    scheduler.pool.publish(sequence, since=0)
    scheduler.preempt(sequence)
    next_step(scheduler)
    assert scheduler.admitted == [sequence]
    assert (sequence.filled, sequence.num_cached_prompt_tokens) == ([4], 0)


def test_short_runs_alternate_with_long_runs_which_share_a_chunk() -> None:
    scheduler = scheduler_with(num_pages=200, chunk_rows=6)
    for arrival, num_tokens in enumerate([50, 40, 3, 2]):
        newcomer(scheduler, arrival, num_tokens)
    turns = []
    for _ in range(3):
        step = next_step(scheduler)
        turns.append([(run.sequence.id, run.stop) for run in step.runs])
        carry_out(step)
    assert turns == [[("0", 6)], [("2", 3), ("3", 2)], [("0", 12)]]


def test_long_runs_alone_may_use_the_whole_row_budget() -> None:
    scheduler = scheduler_with(num_pages=200, chunk_rows=6)
    newcomer(scheduler, 0, 50)
    newcomer(scheduler, 1, 70)
    assert [run.stop for run in next_step(scheduler).runs] == [50, 50]


def test_one_call_emits_several_tokens_if_all_sequences_run_and_pages_are_free() -> None:
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
def test_with_short_runs_long_runs_get_at_most_a_chunk_in_every_other_step(
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
        emit_at_random(step, num_blocks, rng)


def emit_at_random(step: Step, num_blocks: int, rng: random.Random) -> None:
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
def test_no_running_sequence_is_passed_over_for_long(
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
        emit_at_random(step, num_blocks, rng)


@given(
    schedules,
    st.integers(1, 4),
    st.integers(CONTEXT // 2, 30),
    st.integers(1, 5),
    st.integers(1, 30),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_every_sequence_finishes_whatever_the_limits(
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
        emit_at_random(step, num_blocks, rng)
        for run in step.runs:
            if run.sequence.num_tokens == unfinished[run.sequence.id]:
                del unfinished[run.sequence.id]
                scheduler.remove(run.sequence)
        scheduler.check_integrity()
    assert not unfinished
    assert scheduler.pool.num_free == num_pages
