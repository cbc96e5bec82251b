from dataclasses import replace

import pytest

from nvium_core import NviumForCausalLM, SamplingParams, TokenEvent
from tests.engine.driving import (
    PROMPT,
    alone,
    drained,
    engine_with,
    events_of,
    logprobs_of,
    small_model,
)

NUM_SHARED = 8
"""Rows of the prompt in full pages before the front row."""
PARAMS = SamplingParams(max_tokens=5, seed=11, n=4, ignore_eos=True)

schedules = pytest.mark.parametrize("schedule", ["race", "sweep", "whole"])

MODEL = small_model()


@schedules
def test_the_full_pages_of_a_prompt_are_computed_once(schedule):
    engine = engine_with(MODEL, schedule)
    engine.add("x", PROMPT, PARAMS)
    num_rows = 0
    while engine.has_work:
        engine.step()
        num_rows += sum(report.num_rows for report in engine.reports if report.block == 1)
    of_prompts = len(PROMPT) + 3 * (len(PROMPT) - NUM_SHARED)
    assert num_rows == of_prompts + 4 * (PARAMS.max_tokens - 1)
    assert engine.pool.num_rows_found == 3 * NUM_SHARED


def test_choices_differ_and_are_numbered_from_the_requested_one():
    engine = engine_with(MODEL, "sweep")
    engine.add("x", PROMPT, replace(PARAMS, choice=5, n=2))
    found = drained(engine)
    assert found.keys() == {("x", 5), ("x", 6)}
    assert found["x", 5].token_ids != found["x", 6].token_ids
    assert found["x", 6].token_ids == alone(MODEL, PROMPT, replace(PARAMS, choice=6)).token_ids


def seed_that_exits_first(model: NviumForCausalLM) -> int:
    first = SamplingParams(max_tokens=1)
    return next(seed for seed in range(100) if alone(model, PROMPT, replace(first, seed=seed)).exits == [1])


def test_a_leader_that_exits_early_still_completes_the_prompt_for_the_others():
    engine, seed = engine_with(MODEL, "sweep"), seed_that_exits_first(MODEL)
    engine.add("x", PROMPT, SamplingParams(max_tokens=30, seed=seed, n=4, ignore_eos=True))
    emitted, *_ = engine.step()
    assert (emitted.choice, emitted.exit) == (0, 1)
    while engine.scheduler.waiting:
        engine.step()
    (leader, *_) = engine.scheduler.running
    assert leader.num_generated < 4
    assert engine.pool.num_rows_found == 3 * NUM_SHARED


def test_a_finished_leader_stays_until_the_prompt_is_complete():
    engine, seed = engine_with(MODEL, "sweep"), seed_that_exits_first(MODEL)
    (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=1, seed=seed))
    engine.add("x", PROMPT, SamplingParams(max_tokens=1, seed=seed, n=4))
    found = list(events_of(engine))
    assert sorted(event.choice for event in found) == [0, 1, 2, 3]
    assert found[0] == TokenEvent("x", completion.token_ids[0], 1, completion.exit_probabilities[0], "length")
    assert engine.pool.num_rows_found == 3 * NUM_SHARED


def test_choices_wait_until_the_leader_has_completed_the_prompt_if_pages_are_shared():
    engine = engine_with(MODEL, "sweep", prefix_caching=False)
    engine.add("x", PROMPT, PARAMS)
    engine.step()
    assert len(engine.scheduler.running) == 4
    engine = engine_with(MODEL, "sweep", max_rows_per_step=3)
    engine.add("x", PROMPT, PARAMS)
    while engine.scheduler.waiting:
        engine.step()
        (leader, *others) = engine.scheduler.running
        assert not others or leader.filled[-1] >= NUM_SHARED


def test_the_best_choices_have_the_highest_mean_log_probability():
    params = replace(PARAMS, n=2, best_of=5)
    completions = [alone(MODEL, PROMPT, replace(PARAMS, choice=choice)).token_ids for choice in range(5)]
    assert len({len(token_ids) for token_ids in completions}) == 1

    def mean_logprob(token_ids: list[int]) -> float:
        return sum(logprobs_of(MODEL, [*PROMPT, *token_ids])[len(PROMPT) - 1 :]) / len(token_ids)

    chosen = engine_with(MODEL, "sweep").generate([PROMPT], params)
    assert [c.token_ids for c in chosen] == sorted(completions, key=mean_logprob, reverse=True)[:2]


def test_the_best_are_found_among_choices_of_different_lengths():
    params = SamplingParams(max_tokens=12, seed=4, n=1, best_of=6, stop_token_ids=(1, 2, 3), logprobs=0)
    completions = engine_with(MODEL, "sweep").generate([PROMPT], replace(params, n=6, best_of=None))
    assert len({len(completion.token_ids) for completion in completions}) > 2
    (chosen,) = engine_with(MODEL, "sweep").generate([PROMPT], params)
    assert chosen.mean_logprob == pytest.approx(max(completion.mean_logprob for completion in completions), abs=1e-10)


def test_a_request_is_admitted_while_choices_before_it_are_held():
    engine = engine_with(MODEL, "sweep", max_rows_per_step=4, max_sequences=2)
    engine.add("forked", PROMPT * 3, PARAMS)
    engine.add("behind", [1, 2], replace(PARAMS, n=1))
    engine.step()
    assert [(s.request_id, s.choice) for s in engine.scheduler.running] == [("forked", 0), ("behind", 0)]
    assert len(drained(engine)) == 5
