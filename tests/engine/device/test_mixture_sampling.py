from functools import partial

import torch

from nvium_core import Engine, SamplingParams
from tests import reference
from tests.engine.driving import log_mixtures
from tests.random_models import random_model


def test_tokens_of_probability_zero_are_harmless():
    model = random_model([1, 3], seed=8)
    with torch.no_grad():
        model.lm_head.weight *= 2000
    wishes = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {3: -7.0}, "top_p": 0.9}
    params = SamplingParams(max_tokens=12, seed=2, ignore_eos=True, sampling="mixture", **wishes)
    (completion,) = Engine(model).generate([[1, 2]], params)
    assert (log_mixtures(model, [1, 2, *completion.token_ids]).exp() == 0).any()
    expected = reference.sample(model, [1, 2], partial(reference.uniform, 2, 0), params)
    assert completion.token_ids == [s.token_id for s in expected]
