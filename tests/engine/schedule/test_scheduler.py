"""Admission, the choice of Steps and preemption, without a model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import EngineConfig, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import SWEEP, WHOLE
from nvium_core.engine.schedule.scheduler import Scheduler, assumed
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step

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
    return Scheduler(pool, EngineConfig(schedule=schedule, **limits, **settings), num_blocks=num_blocks)


def newcomer(scheduler: Scheduler, arrival: int, num_tokens: int) -> Sequence:
    tokens, num_blocks = [0] * num_tokens, scheduler.num_blocks
    params = SamplingParams(max_tokens=1000)
    sequence = Sequence(str(arrival), tokens, params, seed=0, num_blocks=num_blocks, arrival=arrival)
    scheduler.add(sequence)
    return sequence


def carry_out(step: Step, exiting: set[str] = frozenset()) -> None:
    """Advance all runs. The sequences in `exiting` emit at the first exit that their front row reaches."""
    for run in step.runs:
        sequence = run.sequence
        for block in step.blocks:
            asked = run.reaches_front and sequence.filled[block] < run.stop
            sequence.filled[block] = max(sequence.filled[block], run.stop)
            if asked and sequence.request_id in exiting and step.policy is SWEEP:
                break
        if run.reaches_front and sequence.request_id in exiting:
            sequence.append(0)


def num_rows(step: Step) -> int:
    """Count the rows of the Step's first block."""
    return sum(max(0, run.stop - run.sequence.filled[step.blocks[0]]) for run in step.runs)


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def test_deferred_rows_are_computed_with_later_rows_of_their_block():
    scheduler = scheduler_with()
    lone = newcomer(scheduler, 0, 5)
    carry_out(next_step(scheduler), exiting={"0"})
    assert lone.filled == [5, 0, 0]
    carry_out(next_step(scheduler))
    assert lone.filled == [6, 6, 6]


def test_a_long_prompt_is_cut_to_the_row_budget_of_every_block():
    scheduler = scheduler_with(max_rows=4)
    newcomer(scheduler, 0, 10)
    step = next_step(scheduler)
    assert (step.blocks, [run.stop for run in step.runs]) == (range(1), [4])
    assert not step.runs[0].reaches_front
    scheduler = scheduler_with("whole", max_rows=4)
    sequence = newcomer(scheduler, 0, 9)
    next_step(scheduler)
    sequence.filled = [9, 9, 2]
    assert [run.stop for run in next_step(scheduler).runs] == [6]


def test_a_lone_sequence_continues_until_its_front_emits():
    scheduler = scheduler_with()
    newcomer(scheduler, 0, 5)
    step = next_step(scheduler)
    assert (step.blocks, step.policy) == (range(3), SWEEP)
    newcomer(scheduler, 1, 5)
    assert next_step(scheduler).blocks == range(1)


def test_sweep_runs_the_deepest_block_with_all_sequences_that_wait_for_it():
    scheduler = scheduler_with()
    for arrival in range(3):
        newcomer(scheduler, arrival, 2)
    carry_out(next_step(scheduler), exiting={"1"})
    step = next_step(scheduler)
    assert (step.blocks, [run.sequence.request_id for run in step.runs]) == (range(1, 2), ["0", "2"])


def test_the_youngest_is_preempted_when_pages_run_out_and_keeps_its_tokens():
    scheduler = scheduler_with(num_pages=4)
    old, young = newcomer(scheduler, 0, 4), newcomer(scheduler, 1, 2)
    carry_out(next_step(scheduler), exiting={"0", "1"})
    assert [run.sequence for run in next_step(scheduler).runs] == [old]
    assert scheduler.num_preemptions == 1
    assert young.filled == [0, 0, 0]
    assert young.num_tokens == 3
    assert list(scheduler.waiting) == [young]
    scheduler.check_integrity()


def test_sequences_beyond_the_limit_wait_their_turn_and_a_seat_has_one_owner():
    scheduler = scheduler_with(max_sequences=2)
    first, second, _ = (newcomer(scheduler, arrival, 1) for arrival in range(3))
    assert len(next_step(scheduler).runs) == 2
    scheduler.remove(first)
    next_step(scheduler)
    assert [s.request_id for s in scheduler.running] == ["1", "2"]
    scheduler.check_integrity()
    second.seat = scheduler.running[1].seat
    with pytest.raises(AssertionError, match="seat"):
        scheduler.check_integrity()


@pytest.mark.parametrize("num_steps_between", [0, 1])
@pytest.mark.parametrize(("num_pages", "num_admitted"), [(4, 1), (5, 2)])
def test_admission_leaves_every_running_sequence_a_free_page(num_steps_between, num_pages, num_admitted):
    scheduler = scheduler_with(num_pages=num_pages)
    newcomer(scheduler, 0, 4)
    for _ in range(num_steps_between):
        next_step(scheduler)
    newcomer(scheduler, 1, 4)
    next_step(scheduler)
    assert len(scheduler.running) == num_admitted


def test_a_lone_sequence_may_take_every_page_and_none_overtakes_one_that_waits_for_pages():
    scheduler = scheduler_with(num_pages=4)
    newcomer(scheduler, 0, 8)
    assert num_rows(next_step(scheduler)) == 8
    scheduler = scheduler_with(num_pages=6)
    newcomer(scheduler, 0, 4)
    newcomer(scheduler, 1, 10)
    newcomer(scheduler, 2, 1)
    next_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.running] == ["0"]


def test_choices_that_wait_for_their_leader_delay_no_other_request():
    scheduler = scheduler_with()
    choices = [newcomer(scheduler, arrival, 9) for arrival in range(3)]
    for sequence in choices:
        sequence.siblings = choices
    newcomer(scheduler, 3, 2)
    carry_out(next_step(scheduler))
    assert [sequence.request_id for sequence in scheduler.running] == ["0", "3"]
    scheduler.remove(choices[0])
    next_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.running] == ["1", "3"]


def test_admitted_sequences_and_their_cached_prompt_tokens_are_reported():
    scheduler = scheduler_with("sweep", num_blocks=1)
    first = newcomer(scheduler, 0, 7)
    assert first.num_cached_prompt_tokens is None
    step = next_step(scheduler)
    assert (scheduler.admitted, first.num_cached_prompt_tokens) == ([first], 0)
    carry_out(step, exiting={"0"})
    scheduler.pool.register(first, since=0)
    second = newcomer(scheduler, 1, 7)
    step = next_step(scheduler)
    assert (scheduler.admitted, second.num_cached_prompt_tokens) == ([second], 6)
    carry_out(step, exiting={"0", "1"})
    assert next_step(scheduler) and scheduler.admitted == []


def test_rows_found_after_a_preemption_do_not_count_as_cached_prompt_tokens():
    scheduler = scheduler_with("sweep", num_blocks=1)
    sequence = newcomer(scheduler, 0, 3)
    for _ in range(3):
        carry_out(next_step(scheduler), exiting={"0"})
    scheduler.pool.register(sequence, since=0)
    scheduler.preempt(sequence)
    next_step(scheduler)
    assert scheduler.admitted == [sequence]
    assert (sequence.filled, sequence.num_cached_prompt_tokens) == ([4], 0)


@pytest.mark.parametrize(("schedule", "async_scheduling"), [("sweep", False), ("whole", True)])
def test_short_runs_alternate_with_long_runs_which_share_a_chunk_unless_they_are_alone(schedule, async_scheduling):
    scheduler = scheduler_with(schedule, num_pages=200, chunk_rows=6)
    scheduler.async_scheduling = async_scheduling
    for arrival, num_tokens in enumerate([50, 40, 3, 2]):
        newcomer(scheduler, arrival, num_tokens)
    turns = []
    for _ in range(3):
        step = next_step(scheduler)
        turns.append([(run.sequence.request_id, run.stop) for run in step.runs])
        carry_out(step, exiting={"2", "3"})
    assert turns == [[("0", 6)], [("2", 3), ("3", 2)], [("0", 12)]]
    scheduler = scheduler_with(num_pages=200, chunk_rows=6)
    newcomer(scheduler, 0, 50)
    newcomer(scheduler, 1, 70)
    assert [run.stop for run in next_step(scheduler).runs] == [50, 50]


def test_one_call_emits_several_tokens_if_all_sequences_run_and_pages_are_free():
    scheduler = scheduler_with(num_pages=12)
    scheduler.num_multi_steps = 8
    lone = newcomer(scheduler, 0, 5)
    assert next_step(scheduler).limit == 8
    assert len(lone.pages) == 6
    newcomer(scheduler, 1, 5)
    carry_out(next_step(scheduler))
    assert next_step(scheduler).limit == 1


def test_a_step_ahead_that_is_not_run_takes_no_turn(monkeypatch):
    scheduler = scheduler_with("race", num_pages=200, chunk_rows=6)
    scheduler.async_scheduling = True
    sequences = [newcomer(scheduler, arrival, num_tokens) for arrival, num_tokens in enumerate([50, 3])]
    monkeypatch.setattr(scheduler.schedules, "choose", lambda _: WHOLE)
    step = next_step(scheduler)
    assert [rows.sequence.request_id for rows in step.async_rows] == ["1"]
    assert [sequence.last_step for sequence in sequences] == [1, 0]
    carry_out(step)
    monkeypatch.setattr(scheduler.schedules, "choose", lambda _: SWEEP)
    step = next_step(scheduler)
    assert (step.policy, [run.sequence.request_id for run in step.runs]) == (SWEEP, ["1"])
    assert [sequence.last_step for sequence in sequences] == [1, 2]


def test_assumed_outcomes_are_taken_back_after_an_error():
    sequence = newcomer(scheduler_with(), 0, 5)
    with pytest.raises(ZeroDivisionError), assumed([Run(sequence, 5)], [sequence]):
        raise ZeroDivisionError
    assert (sequence.token_ids, sequence.filled) == ([0] * 5, [0, 0, 0])


Workload = tuple[Scheduler, list[Sequence], random.Random]


@st.composite
def workloads(draw: st.DrawFn, prompts: st.SearchStrategy[list[int]], **limits: st.SearchStrategy[int]) -> Workload:
    """Draw a scheduler with these limits, its sequences, and a generator of exits."""
    schedule, num_blocks = draw(st.sampled_from(["race", "whole", "sweep"])), draw(st.integers(1, 4))
    scheduler = scheduler_with(schedule, num_blocks, **{name: draw(limit) for name, limit in limits.items()})
    scheduler.async_scheduling = draw(st.booleans())
    sequences = [newcomer(scheduler, arrival, num_tokens) for arrival, num_tokens in enumerate(draw(prompts))]
    return scheduler, sequences, draw(st.randoms(use_true_random=False))


def lengths(longest: int, *, fewest: int = 1, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, longest), min_size=fewest, max_size=most)


@given(
    workloads(
        lengths(60, fewest=2, most=5), num_pages=st.just(1000), max_rows=st.just(400), chunk_rows=st.integers(1, 20)
    )
)
def test_with_short_runs_long_runs_get_at_most_a_chunk_in_every_other_step(workload):
    scheduler, sequences, rng = workload
    num_without_short = 0
    for _ in range(60):
        step = next_step(scheduler)
        long = {each for each in sequences if scheduler._is_long(each, scheduler._policy.ready_block(each, False))}
        long_runs = [run for run in step.runs if run.sequence in long]
        some_are_short = len(long) < len(sequences)
        last = step.passes[0][-1]
        taken = sum(run.stop - run.sequence.filled[last] for run in long_runs)
        assert taken <= (scheduler.config.chunk_rows if some_are_short else 400)
        is_without_short = some_are_short and len(long_runs) == len(step.runs)
        num_without_short = num_without_short + 1 if is_without_short else 0
        assert num_without_short <= 1
        emit_at_random(scheduler, step, rng)


def emit_at_random(scheduler: Scheduler, step: Step, rng: random.Random) -> None:
    is_last = step.blocks[-1] == scheduler.num_blocks - 1
    carry_out(step, exiting={run.sequence.request_id for run in step.runs if is_last or rng.random() < 0.4})


@given(
    workloads(
        lengths(60, most=6),
        num_pages=st.just(2000),
        max_wait_steps=st.integers(1, 12),
        max_rows=st.integers(4, 100),
        chunk_rows=st.integers(1, 20),
    )
)
def test_no_running_sequence_is_passed_over_for_long(workload):
    scheduler, sequences, rng = workload
    waited = dict.fromkeys(sequences, 0)
    for _ in range(100):
        step = next_step(scheduler)
        waited = {sequence: steps + 1 for sequence, steps in waited.items()}
        waited |= {run.sequence: 0 for run in step.runs}
        assert max(waited.values()) <= scheduler.config.max_wait_steps + len(sequences)
        emit_at_random(scheduler, step, rng)


@given(
    workloads(
        lengths(12, most=8),
        num_pages=st.integers(CONTEXT // 2, 30),
        max_sequences=st.integers(1, 5),
        max_rows=st.integers(1, 30),
    )
)
def test_every_sequence_finishes_whatever_the_limits(workload):
    scheduler, sequences, rng = workload
    unfinished = {sequence.request_id: sequence.num_tokens + 8 for sequence in sequences}
    for _ in range(20_000):
        step = scheduler.schedule()
        if step is None:
            break
        assert num_rows(step) <= scheduler.config.max_rows_per_step
        assert all(run.stop > run.sequence.filled[step.blocks[-1]] for run in step.runs)
        assert all(scheduler.pool.num_pages_for(run.stop) <= len(run.sequence.pages) for run in step.runs)
        emit_at_random(scheduler, step, rng)
        for run in step.runs:
            if run.sequence.num_tokens == unfinished[run.sequence.request_id]:
                del unfinished[run.sequence.request_id]
                scheduler.remove(run.sequence)
        scheduler.check_integrity()
    assert not unfinished
    assert scheduler.pool.num_free == scheduler.pool.num_pages
