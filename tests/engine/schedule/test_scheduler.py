"""The choice of Steps, without a model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import EngineConfig, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.schedule.admission import Admission
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.scheduler import Scheduler, assume_passed
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import SWEEP, WHOLE, Run, Step

CONTEXT = 20


def scheduler_with(schedule: Schedule = "sweep", num_blocks: int = 3, num_pages: int = 40, **limits: int) -> Scheduler:
    config = EngineConfig(schedule=schedule, **{"max_sequences": 8, "max_rows_per_step": 100} | limits)
    return Scheduler(Admission(PagePool(num_pages, page_size=2), config.max_sequences), config, num_blocks=num_blocks)


def newcomer(scheduler: Scheduler, arrival: int, num_tokens: int) -> Sequence:
    tokens, num_blocks = [0] * num_tokens, scheduler.num_blocks
    params = SamplingParams(max_tokens=1000)
    sequence = Sequence(str(arrival), tokens, params, seed=0, num_blocks=num_blocks, arrival=arrival)
    scheduler.admission.waiting.add(sequence)
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
    scheduler = scheduler_with(max_rows_per_step=4)
    newcomer(scheduler, 0, 10)
    step = next_step(scheduler)
    assert (step.blocks, [run.stop for run in step.runs]) == (range(1), [4])
    assert not step.runs[0].reaches_front
    scheduler = scheduler_with("whole", max_rows_per_step=4)
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
    with pytest.raises(ZeroDivisionError), assume_passed([Run(sequence, 5)], [sequence]):
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


roomy = {"num_pages": st.just(2000), "chunk_rows": st.integers(1, 20)}


@given(workloads(lengths(60, fewest=2, most=5), **roomy, max_rows_per_step=st.just(400)))
def test_with_short_runs_long_runs_get_at_most_a_chunk_in_every_other_step(workload):
    scheduler, sequences, rng = workload
    num_without_short = 0
    for _ in range(60):
        step = next_step(scheduler)
        long = {each for each in sequences if scheduler._is_long(each, scheduler._policy.ready_block(each, False))}
        long_runs = [run for run in step.runs if run.sequence in long]
        some_are_short = len(long) < len(sequences)
        last = step.policy.passes(step.blocks)[0][-1]
        taken = sum(run.stop - run.sequence.filled[last] for run in long_runs)
        assert taken <= (scheduler.config.chunk_rows if some_are_short else 400)
        is_without_short = some_are_short and len(long_runs) == len(step.runs)
        num_without_short = num_without_short + 1 if is_without_short else 0
        assert num_without_short <= 1
        emit_at_random(scheduler, step, rng)


def emit_at_random(scheduler: Scheduler, step: Step, rng: random.Random) -> None:
    is_last = step.blocks[-1] == scheduler.num_blocks - 1
    carry_out(step, exiting={run.sequence.request_id for run in step.runs if is_last or rng.random() < 0.4})


waits = {"max_wait_steps": st.integers(1, 12), "max_rows_per_step": st.integers(4, 100)}


@given(workloads(lengths(60, most=6), **roomy, **waits))
def test_no_running_sequence_is_passed_over_for_long(workload):
    scheduler, sequences, rng = workload
    waited = dict.fromkeys(sequences, 0)
    for _ in range(100):
        step = next_step(scheduler)
        waited = {sequence: steps + 1 for sequence, steps in waited.items()}
        waited |= {run.sequence: 0 for run in step.runs}
        assert max(waited.values()) <= scheduler.config.max_wait_steps + len(sequences)
        emit_at_random(scheduler, step, rng)


tight = {"num_pages": st.integers(CONTEXT // 2, 30), "max_sequences": st.integers(1, 5)}


@given(workloads(lengths(12, most=8), **tight, max_rows_per_step=st.integers(1, 30)))
def test_every_sequence_finishes_whatever_the_limits(workload):
    scheduler, sequences, rng = workload
    unfinished = {sequence.request_id: sequence.num_tokens + 8 for sequence in sequences}
    for _ in range(20_000):
        step = scheduler.schedule()
        if step is None:
            break
        assert num_rows(step) <= scheduler.config.max_rows_per_step
        assert all(run.stop > run.sequence.filled[step.blocks[-1]] for run in step.runs)
        assert all(scheduler.admission.pool.num_pages_for(run.stop) <= len(run.sequence.pages) for run in step.runs)
        emit_at_random(scheduler, step, rng)
        for run in step.runs:
            if run.sequence.num_tokens == unfinished[run.sequence.request_id]:
                del unfinished[run.sequence.request_id]
                scheduler.admission.remove(run.sequence)
        scheduler.admission.check_integrity()
    assert not unfinished
    assert scheduler.admission.pool.num_free == scheduler.admission.pool.num_pages
