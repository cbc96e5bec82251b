"""`sampling: threshold`: exits, scores and defaults. `test_exactness` compares the draws with the reference."""

from itertools import accumulate

import pytest
import torch

from nvium_core import Engine, EngineConfig, Event, InvalidRequest, SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model import mixture
from tests.engine.driving import PROMPT, drained, engine_with, exit_probabilities, small_model
from tests.engine.test_exactness import explicit_logprobs
from tests.random_models import random_model

MODEL = small_model()


def asked(**more: object) -> SamplingParams:
    usual = {"sampling": "threshold", "threshold": 0.2, "max_tokens": 12, "seed": 1, "ignore_eos": True}
    return SamplingParams(**usual | more)


@pytest.mark.parametrize("schedule", ["whole", "sweep"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_log_probabilities_are_those_of_the_exit_that_the_threshold_chooses(schedule, probabilities):
    params = asked(logprobs=2, prompt_logprobs=True, probabilities=probabilities)
    (found,) = engine_with(MODEL, schedule).generate([PROMPT], params)
    token_ids = [*PROMPT, *found.token_ids]
    own = [score.logprob for score in (*found.prompt_scores, *found.scores)]
    p_TE = exit_probabilities(MODEL, token_ids[:-1])
    exits = [next((k for k, p in enumerate(accumulate(row), start=1) if p >= 0.2), 3) for row in p_TE]
    assert own == pytest.approx(explicit_logprobs(MODEL, token_ids[:1], token_ids[1:], exits), abs=1e-10)
    assert len({*found.exits}) > 1, "the threshold must choose several exits, or this test shows little"
    if not probabilities:
        assert [score.exit_probabilities for score in found.scores] == [()] * 12
    else:
        expected = [pytest.approx(p_E) for p_E in p_TE[len(PROMPT) - 1 :]]
        assert [list(score.exit_probabilities) for score in found.scores] == expected


def test_a_scored_token_is_delivered_when_it_is_emitted_and_no_row_is_owed():
    engine = engine_with(MODEL, "sweep")
    engine.add("a", PROMPT, asked(logprobs=0, threshold=1e-9))
    events, blocks = list[Event](), set[int]()
    while engine.has_work:
        events += engine.step()
        blocks |= {report.block for report in engine.reports if report.num_rows}
    assert [event.exit for event in events] == [1] * 12 and all(event.score for event in events)
    assert blocks == {1}


@pytest.mark.parametrize("threshold", [1.0, 1.5, 1e30])
def test_a_threshold_of_1_is_the_last_exit_even_if_a_gate_rounds_to_1(threshold):
    model = random_model([1, 2, 3], dtype=torch.float32)
    with torch.no_grad():
        for exit_ in model.exits[:-1]:
            exit_.router.head.bias.copy_(torch.tensor([-200.0, 200.0]))
    (found,) = Engine(model).generate([PROMPT], asked(threshold=threshold))
    assert {*found.exits} == {3}
    (early,) = Engine(model).generate([PROMPT], asked(threshold=0.999))
    assert {*early.exits} == {1}


def test_the_engines_default_threshold_applies_unless_the_request_sets_one():
    engine = Engine(MODEL, EngineConfig(sampling="threshold", exit_threshold=0.9))
    plain, own = asked(sampling=None, threshold=None), asked(sampling=None, threshold=0.2)
    for params, threshold in ((plain, 0.9), (own, 0.2), (asked(threshold=None), 0.9)):
        engine.add("a", PROMPT, params)
        expected = Engine(MODEL).generate([PROMPT], asked(threshold=threshold))[0]
        assert drained(engine)["a", 0].exits == expected.exits


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), "0.5", True])
def test_a_threshold_must_be_a_finite_number_above_0(wrong):
    with pytest.raises(InvalidRequest, match=r"^threshold: must be a finite number above 0"):
        asked(threshold=wrong)
    with pytest.raises(InvalidRequest, match=r"^exit_threshold: must be a finite number above 0"):
        EngineConfig(exit_threshold=wrong)


def test_the_rule_and_its_threshold_need_each_other():
    with pytest.raises(InvalidRequest, match=r"^threshold: required by sampling 'threshold'"):
        Engine(MODEL).add("a", PROMPT, asked(threshold=None))
    for sampling in ("exits", "mixture", "original", None):
        with pytest.raises(InvalidRequest, match=r"^threshold: requires sampling 'threshold'"):
            Engine(MODEL).add("a", PROMPT, asked(sampling=sampling))
    with pytest.raises(InvalidRequest, match=r"^exit_threshold: required by sampling 'threshold'"):
        EngineConfig(sampling="threshold")


def test_only_the_front_waits_until_an_echoed_prompt_has_its_scores():
    sequence = Sequence("a", PROMPT, asked(logprobs=0, prompt_logprobs=True), seed=0, num_blocks=3, arrival=0)
    assert sequence.pending_rows(0) == range(len(PROMPT) - 1)
    sequence.num_scored = len(PROMPT) - 1
    assert sequence.pending_rows(0) == range(len(PROMPT))


def test_the_threshold_exit_is_the_first_whose_cumulative_probability_is_large_enough():
    log_w = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64).log()
    remaining = mixture.log_remaining(log_w)
    chosen = [int(mixture.threshold_exit(remaining, q)) for q in (0.1, 0.5, 0.51, 0.75, 0.76, float("inf"))]
    assert chosen == [0, 0, 1, 1, 2, 2]
