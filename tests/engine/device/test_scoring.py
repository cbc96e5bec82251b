from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvium_core import (
    Completion,
    Engine,
    EngineConfig,
    NviumForCausalLM,
    PromptEvent,
    SamplingParams,
    Score,
    TokenEvent,
)
from nvium_core.engine.schedule import sequence
from nvium_core.engine.schedule.sequence import SCORE_WINDOW
from tests.engine.driving import (
    PROMPT,
    Layers,
    alone,
    drained,
    engine_on,
    events_of,
    exit_probabilities,
    log_mixtures,
    logprobs_of,
    small_model,
    together,
)
from tests.engine.test_exactness import configs
from tests.random_models import random_model

VOCAB_SIZE = 17
MODEL = small_model(context=128)
LONG_PROMPT = [(7 * t + t // 5) % VOCAB_SIZE for t in range(50)]
PARAMS = SamplingParams(max_tokens=40, seed=7, ignore_eos=True, logprobs=3)
EXACT = {"abs": 1e-10, "rel": 0}

schedules = pytest.mark.parametrize("schedule", ["race", "sweep", "whole"])


def check_scores(model: NviumForCausalLM, prompt: list[int], completion: Completion, *, num_top: int) -> None:
    """Assert that all scores equal those of one full forward pass."""
    token_ids = [*prompt, *completion.token_ids]
    scores = [*completion.prompt_scores, *completion.scores]
    first = len(token_ids) - len(scores)
    assert [score.logprob for score in scores] == pytest.approx(logprobs_of(model, token_ids)[first - 1 :], **EXACT)
    log_mix_TV, probabilities = log_mixtures(model, token_ids).tolist(), exit_probabilities(model, token_ids)
    for row, score in enumerate(scores, first - 1):
        check_top(score, token_ids[row + 1], log_mix_TV[row], num_top)
        assert score.exit_probabilities == pytest.approx(probabilities[row], **EXACT)


def check_top(score: Score, token: int, log_mixture: list[float], num_top: int) -> None:
    assert len(score.top) == num_top
    largest = sorted(log_mixture, reverse=True)[:num_top]
    assert [logprob for _, logprob in score.top] == pytest.approx(largest, **EXACT)
    assert [log_mixture[other] for other, _ in score.top] == pytest.approx(largest, **EXACT)
    assert dict(score.top).get(token, score.logprob) == score.logprob


@pytest.mark.parametrize("num_top", [0, 1, VOCAB_SIZE, 20])
def test_the_requested_number_of_alternatives_is_returned(num_top):
    (completion,) = Engine(MODEL).generate([PROMPT], replace(PARAMS, logprobs=num_top))
    check_scores(MODEL, PROMPT, completion, num_top=min(num_top, VOCAB_SIZE))


@schedules
def test_exit_probabilities_change_no_token_and_include_that_of_the_exit_taken(schedule):
    asked = replace(PARAMS, logprobs=None, probabilities=True)
    (completion,) = Engine(MODEL, EngineConfig(schedule=schedule)).generate([PROMPT], asked)
    plain = alone(MODEL, PROMPT, replace(PARAMS, logprobs=None))
    assert (completion.token_ids, completion.exits) == (plain.token_ids, plain.exits)
    check_scores(MODEL, PROMPT, completion, num_top=0)
    taken = [score.exit_probabilities[k - 1] for score, k in zip(completion.scores, completion.exits, strict=True)]
    assert taken == pytest.approx(completion.exit_probabilities, **EXACT)


def test_scores_of_all_sequences_in_a_step_take_one_pass_through_the_exits(monkeypatch):
    plan = [([*PROMPT, n], replace(PARAMS, seed=n, logprobs=n)) for n in range(6)]
    plan[2] = PROMPT, replace(PARAMS, sampling="original", logprobs=2)
    expected, num_calls = together(Engine(MODEL), plan), 0
    exit_outputs = type(MODEL).exit_outputs

    def counted(model: NviumForCausalLM, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        nonlocal num_calls
        num_calls += 1
        return exit_outputs(model, states)

    monkeypatch.setattr(type(MODEL), "exit_outputs", counted)
    config = EngineConfig(schedule="whole", max_drafts=0)
    found = together(engine_on(Layers, MODEL, config), plan)
    assert num_calls == PARAMS.max_tokens
    for own, others in zip(found, expected, strict=True):
        for one, other in zip(own.scores, others.scores, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert one.logprob == pytest.approx(other.logprob, **EXACT)


def test_a_prompt_alone_can_be_scored():
    engine = Engine(MODEL, EngineConfig(max_rows_per_step=7))
    engine.add("x", LONG_PROMPT, replace(PARAMS, max_tokens=0, prompt_logprobs=True))
    found = list(events_of(engine))
    assert {type(event) for event in found} == {PromptEvent}
    assert [event.finish_reason for event in found] == [None] * (len(found) - 1) + ["length"]
    logprobs = [score.logprob for event in found for score in event.scores]
    assert logprobs == pytest.approx(logprobs_of(MODEL, LONG_PROMPT), **EXACT)


def lateness(engine: Engine) -> Iterator[int]:
    """Yield after every Step how many tokens of a single sequence are generated but not yet reported."""
    num_reported = 0
    while engine.has_work:
        running = [*engine.admission.waiting, *engine.admission.running]
        num_reported += sum(isinstance(event, TokenEvent) for event in engine.step())
        yield max((sequence.num_generated - num_reported for sequence in running if engine.has_work), default=0)


def test_deferred_tokens_are_reported_within_the_window():
    hasty = random_model([1, 2], seed=3, width=8, num_heads=2, num_key_heads=1, context=128)
    hasty.exits[0].router.head.bias.data += hasty.exits[0].router.head.bias.new_tensor([-40.0, 40.0])
    engine = Engine(hasty, EngineConfig(schedule="sweep"))
    engine.add("x", PROMPT, replace(PARAMS, max_tokens=100))
    assert max(lateness(engine)) in (SCORE_WINDOW - 1, SCORE_WINDOW)
    (completion,) = Engine(hasty, EngineConfig(schedule="sweep")).generate([PROMPT], replace(PARAMS, max_tokens=100))
    assert set(completion.exits) == {1}
    check_scores(hasty, PROMPT, completion, num_top=3)


def test_a_sequence_preempted_before_its_scores_still_gets_them():
    engine = Engine(MODEL, EngineConfig(schedule="sweep", cache_tokens=80, page_size=4, max_rows_per_step=16))
    prompts, preempt, owed = [[token, *PROMPT] for token in range(4)], engine.admission.preempt, list[bool]()

    def preempt_and_note(victim: sequence.Sequence) -> None:
        owed.append(victim.owes_scores and victim.num_generated > 0)
        preempt(victim)

    engine.admission.preempt = preempt_and_note
    found = together(engine, [(prompt, replace(PARAMS, prompt_logprobs=True)) for prompt in prompts])
    assert any(owed)
    for prompt, completion in zip(prompts, found, strict=True):
        assert completion.token_ids == alone(MODEL, prompt, PARAMS).token_ids
        check_scores(MODEL, prompt, completion, num_top=3)


def test_a_long_prompt_is_scored_in_few_steps():
    model = small_model(context=1100)
    prompt = [(7 * t + t // 5) % VOCAB_SIZE for t in range(1024)]
    engine = Engine(model, EngineConfig(max_sequences=2))
    engine.add("x", prompt, replace(PARAMS, max_tokens=0, prompt_logprobs=True))
    found, num_steps = Completion(), 0
    while engine.has_work:
        for event in engine.step():
            found.append(event)
        num_steps += len(engine.reports)
    assert num_steps <= 3 * 1024 / 256
    check_scores(model, prompt, found, num_top=3)


scored_requests = st.tuples(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 10),
        temperature=st.sampled_from([0.0, 0.6, 1.0]),
        top_k=st.sampled_from([0, 9]),
        logit_bias=st.sampled_from([{}, {3: 2.0}]),
        seed=st.integers(0, 99),
        logprobs=st.integers(0, 3),
        prompt_logprobs=st.booleans(),
        n=st.integers(1, 2),
    ),
)


@settings(max_examples=settings().max_examples // 2)
@given(configs, st.lists(scored_requests, min_size=1, max_size=3), st.integers(1, 6))
def test_scores_are_exact_whatever_the_schedule_and_the_window(config, plan, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "SCORE_WINDOW", window)
        engine = Engine(MODEL, replace(config, context=32, cache_tokens=48))
        for number, (prompt, params) in enumerate(plan):
            engine.add(str(number), prompt, params)
        found = drained(engine)
    for (name, choice), completion in found.items():
        prompt, params = plan[int(name)]
        assert len(completion.scores) == len(completion.token_ids) > 0
        assert len(completion.prompt_scores) == (len(prompt) - 1) * (params.prompt_logprobs and choice == 0)
        check_scores(MODEL, prompt, completion, num_top=params.logprobs or 0)
