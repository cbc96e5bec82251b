from functools import partial

import pytest
import torch

from nvium_core import Engine, EngineConfig, SamplingParams
from tests import reference
from tests.engine.driving import exit_probabilities, log_mixtures
from tests.engine.test_exactness import PROMPT, VOCAB_SIZE, disagreeing_model, explicit_joint, p_value
from tests.random_models import random_model

NUM_DRAWS = 50_000


@pytest.fixture(scope="module")
def counts() -> torch.Tensor:
    """Count the tokens of requests that differ only in their seeds, [1, V]."""
    engine = Engine(disagreeing_model(), EngineConfig(max_sequences=1000, max_rows_per_step=2000, cache_tokens=16_000))
    counts_V = torch.zeros(1, VOCAB_SIZE, dtype=torch.float64)
    for seed in range(NUM_DRAWS):
        engine.add(str(seed), PROMPT, SamplingParams(max_tokens=1, seed=seed, sampling="mixture"))
    while engine.has_work:
        for event in engine.step():
            counts_V[0, event.token_id] += 1
    return counts_V


@pytest.mark.slow
def test_50000_draws_follow_the_explicit_mixture(counts):
    assert p_value(counts, explicit_joint().sum(0, keepdim=True)) > 1e-3


@pytest.mark.slow
def test_a_mixture_without_one_of_its_exits_is_rejected(counts):
    joint_EV = explicit_joint()
    for exit_ in range(len(joint_EV)):
        others_V = joint_EV.sum(0, keepdim=True) - joint_EV[exit_]
        assert p_value(counts, others_V / others_V.sum()) < 1e-6


def test_the_mixture_emits_at_the_last_exit_with_its_probability():
    model = random_model([1, 2, 4], seed=3)
    params = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, sampling="mixture")
    (completion,) = Engine(model).generate([[1, 2, 3]], params)
    assert completion.exits == [3] * 6
    last = [probabilities[-1] for probabilities in exit_probabilities(model, [1, 2, 3, *completion.token_ids])]
    assert completion.exit_probabilities == pytest.approx(last[2:-1], abs=1e-12)


def test_tokens_of_probability_zero_are_harmless():
    model = random_model([1, 3], seed=8)
    with torch.no_grad():
        model.lm_head.weight *= 2000
    wishes = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {3: -7.0}, "top_p": 0.9}
    params = SamplingParams(max_tokens=12, seed=2, ignore_eos=True, sampling="mixture", **wishes)
    (completion,) = Engine(model).generate([[1, 2]], params)
    assert (log_mixtures(model, [1, 2, *completion.token_ids]).exp() == 0).any()
    asked = reference.Params(sampling="mixture", **wishes)
    expected = reference.sample(model, [1, 2], 12, partial(reference.uniform, 2, 0), asked)
    assert completion.token_ids == [s.token_id for s in expected]
