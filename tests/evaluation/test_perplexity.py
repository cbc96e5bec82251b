"""Perplexity: every token predicted once, and the figures those of a plain forward pass."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import LoadedModel
from nvium_core.evaluation.perplexity import evaluate, windows
from tests.byte_model import load_byte_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model()


@given(st.integers(2, 400), st.integers(2, 64))
def test_every_token_but_the_first_is_a_target_exactly_once(num_tokens: int, context: int) -> None:
    targets: list[int] = []
    for start, first_target, stop in windows(num_tokens, context):
        assert 0 <= start < first_target < stop <= num_tokens
        assert stop - start - 1 <= context
        assert first_target == 1 or first_target - start >= context // 2
        targets += range(first_target, stop)
    assert targets == list(range(1, num_tokens))


def test_a_short_document_is_scored_as_one_forward_pass_would(loaded: LoadedModel) -> None:
    text = "A fox, two hens."
    end = loaded.tokenizer.eos_token_id
    ids = torch.tensor([[end, *loaded.tokenizer.encode(text, add_special_tokens=False), end]])
    with torch.no_grad():
        out = loaded.model(ids, labels=ids)
    figures = evaluate(loaded.model, loaded.tokenizer, [text])
    assert figures.num_tokens == ids.shape[1] - 1
    assert figures.perplexity == pytest.approx(float(out.mix_loss.exp()), rel=1e-5)
    assert figures.exit_perplexities == pytest.approx(out.exit_losses.exp().tolist(), rel=1e-5)
    assert figures.exit_shares == pytest.approx(out.exit_probs[0, :-1].mean(0).tolist(), rel=1e-5)
    assert figures.mean_depth == pytest.approx(float(out.compute_loss), rel=1e-5)
    nats = math.log(figures.perplexity) * figures.num_tokens
    assert figures.bits_per_character == pytest.approx(nats / len(text) / math.log(2))
