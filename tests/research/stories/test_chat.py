from statistics import fmean

import numpy as np
import pytest
import torch

from nvium_core.training.chat.examples import Example
from research.stories.chat import evaluate_chat
from tests.random_models import random_model


@torch.no_grad()
def test_answers_have_the_loss_of_a_forward_pass():
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(1, 17, n), np.arange(n) >= n // 2) for n in (6, 9, 3, 15)]
    model, nll, probs = random_model([1, 2, 4], context=24), [], []
    for each in examples:
        ids, said = torch.from_numpy(each.tokens)[None], torch.from_numpy(each.is_answer[1:])
        out = model(ids)
        nll += (-out.logits[0, :-1][said].gather(-1, ids[0, 1:][said][:, None])).flatten().tolist()
        probs += out.exit_probs[0, :-1][said].tolist()
    found = evaluate_chat(model, examples)
    assert (found.num_conversations, found.num_answer_tokens) == (4, len(nll))
    assert found.answer_loss == pytest.approx(fmean(nll))
    assert found.exit_shares == pytest.approx(np.mean(probs, axis=0).tolist())
    assert found.mean_depth == pytest.approx(float(np.mean(probs, axis=0) @ [0.25, 0.5, 1.0]))
