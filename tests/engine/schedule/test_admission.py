"""Admission, seats and preemption, without a model."""

import pytest

from tests.engine.schedule.test_scheduler import carry_out, newcomer, next_step, num_rows, scheduler_with


def test_the_youngest_is_preempted_when_pages_run_out_and_keeps_its_tokens():
    scheduler = scheduler_with(num_pages=4)
    old, young = newcomer(scheduler, 0, 4), newcomer(scheduler, 1, 2)
    carry_out(next_step(scheduler), exiting={"0", "1"})
    assert [run.sequence for run in next_step(scheduler).runs] == [old]
    assert scheduler.admission.num_preemptions == 1
    assert young.filled == [0, 0, 0]
    assert young.num_tokens == 3
    assert list(scheduler.admission.waiting) == [young]
    scheduler.admission.check_integrity()


def test_sequences_beyond_the_limit_wait_their_turn_and_a_seat_has_one_owner():
    scheduler = scheduler_with(max_sequences=2)
    first, second, _ = (newcomer(scheduler, arrival, 1) for arrival in range(3))
    assert len(next_step(scheduler).runs) == 2
    scheduler.admission.remove(first)
    next_step(scheduler)
    assert [s.request_id for s in scheduler.admission.running] == ["1", "2"]
    scheduler.admission.check_integrity()
    second.seat = scheduler.admission.running[1].seat
    with pytest.raises(AssertionError, match="seat"):
        scheduler.admission.check_integrity()


@pytest.mark.parametrize("num_steps_between", [0, 1])
@pytest.mark.parametrize(("num_pages", "num_admitted"), [(4, 1), (5, 2)])
def test_admission_leaves_every_running_sequence_a_free_page(num_steps_between, num_pages, num_admitted):
    scheduler = scheduler_with(num_pages=num_pages)
    newcomer(scheduler, 0, 4)
    for _ in range(num_steps_between):
        next_step(scheduler)
    newcomer(scheduler, 1, 4)
    next_step(scheduler)
    assert len(scheduler.admission.running) == num_admitted


def test_a_lone_sequence_may_take_every_page_and_none_overtakes_one_that_waits_for_pages():
    scheduler = scheduler_with(num_pages=4)
    newcomer(scheduler, 0, 8)
    assert num_rows(next_step(scheduler)) == 8
    scheduler = scheduler_with(num_pages=6)
    newcomer(scheduler, 0, 4)
    newcomer(scheduler, 1, 10)
    newcomer(scheduler, 2, 1)
    next_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.admission.running] == ["0"]


def test_choices_that_wait_for_their_leader_delay_no_other_request():
    scheduler = scheduler_with()
    choices = [newcomer(scheduler, arrival, 9) for arrival in range(3)]
    for sequence in choices:
        sequence.siblings = choices
    newcomer(scheduler, 3, 2)
    carry_out(next_step(scheduler))
    assert [sequence.request_id for sequence in scheduler.admission.running] == ["0", "3"]
    scheduler.admission.remove(choices[0])
    next_step(scheduler)
    assert [sequence.request_id for sequence in scheduler.admission.running] == ["1", "3"]


def test_admitted_sequences_and_their_cached_prompt_tokens_are_reported():
    scheduler = scheduler_with("sweep", num_blocks=1)
    first = newcomer(scheduler, 0, 7)
    assert first.num_cached_prompt_tokens is None
    step = next_step(scheduler)
    assert (scheduler.admission.admitted, first.num_cached_prompt_tokens) == ([first], 0)
    carry_out(step, exiting={"0"})
    scheduler.admission.pool.register(first, since=0)
    second = newcomer(scheduler, 1, 7)
    step = next_step(scheduler)
    assert (scheduler.admission.admitted, second.num_cached_prompt_tokens) == ([second], 6)
    carry_out(step, exiting={"0", "1"})
    assert next_step(scheduler) and scheduler.admission.admitted == []


def test_rows_found_after_a_preemption_do_not_count_as_cached_prompt_tokens():
    scheduler = scheduler_with("sweep", num_blocks=1)
    sequence = newcomer(scheduler, 0, 3)
    for _ in range(3):
        carry_out(next_step(scheduler), exiting={"0"})
    scheduler.admission.pool.register(sequence, since=0)
    scheduler.admission.preempt(sequence)
    next_step(scheduler)
    assert scheduler.admission.admitted == [sequence]
    assert (sequence.filled, sequence.num_cached_prompt_tokens) == ([4], 0)
