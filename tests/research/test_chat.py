"""The loss of answers equals that of a plain forward pass."""

from statistics import fmean

import numpy as np
import pytest
import torch

from nvium_core import NviumForCausalLM
from nvium_core.training.chat.examples import Example
from research.chat import evaluate_chat
from tests.random_models import random_model

CONTEXT = 24


def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    return [Example(rng.integers(1, 17, n), np.arange(n) >= n // 2) for n in (6, 9, 3, 15)]


@pytest.fixture(scope="module")
def model() -> NviumForCausalLM:
    """A model whose vocabulary is small enough to sample end-of-text, token 0, sometimes."""
    return random_model([1, 2, 4], context=CONTEXT)


@torch.no_grad()
def test_answers_have_the_loss_of_a_forward_pass(model: NviumForCausalLM) -> None:
    nll, probs = [], []
    for each in examples():
        ids, said = torch.from_numpy(each.tokens)[None], torch.from_numpy(each.is_answer[1:])
        out = model(ids)
        nll += (-out.logits[0, :-1][said].gather(-1, ids[0, 1:][said][:, None])).flatten().tolist()
        probs += out.exit_probs[0, :-1][said].tolist()
    found = evaluate_chat(model, examples())
    assert (found.num_conversations, found.num_answer_tokens) == (4, len(nll))
    assert found.answer_loss == pytest.approx(fmean(nll))
    assert found.exit_shares == pytest.approx(np.mean(probs, axis=0).tolist())
    assert found.mean_depth == pytest.approx(float(np.mean(probs, axis=0) @ [0.25, 0.5, 1.0]))
