from dataclasses import replace

import pytest

from nvium_core import NviumForCausalLM, SamplingParams, TokenEvent
from nvium_core.engine.events import mean_logprob
from tests.engine.driving import PROMPT, alone, engine_with, events_of, small_model

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


def seed_that_exits_first(model: NviumForCausalLM) -> int:
    first = SamplingParams(max_tokens=1)
    return next(seed for seed in range(100) if alone(model, PROMPT, replace(first, seed=seed)).exits == [1])


def test_a_leader_that_exits_early_still_completes_the_prompt_for_the_others():
    engine, seed = engine_with(MODEL, "sweep"), seed_that_exits_first(MODEL)
    engine.add("x", PROMPT, SamplingParams(max_tokens=30, seed=seed, n=4, ignore_eos=True))
    emitted, *_ = engine.step()
    assert (emitted.choice, emitted.exit) == (0, 1)
    while engine.admission.waiting:
        engine.step()
    (leader, *_) = engine.admission.running
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
    assert len(engine.admission.running) == 4
    engine = engine_with(MODEL, "sweep", max_rows_per_step=3)
    engine.add("x", PROMPT, PARAMS)
    while engine.admission.waiting:
        engine.step()
        (leader, *others) = engine.admission.running
        assert not others or leader.filled[-1] >= NUM_SHARED


def test_the_best_of_choices_of_different_lengths_have_the_highest_mean_log_probability():
    params = SamplingParams(max_tokens=12, seed=4, n=6, stop_token_ids=(1, 2, 3), logprobs=0)
    completions = engine_with(MODEL, "sweep").generate([PROMPT], params)
    assert len({len(completion.token_ids) for completion in completions}) > 2
    chosen = engine_with(MODEL, "sweep").generate([PROMPT], replace(params, n=2, best_of=6, logprobs=None))
    completions.sort(key=lambda completion: mean_logprob(completion.scores), reverse=True)
    assert [each.token_ids for each in chosen] == [each.token_ids for each in completions[:2]]
