"""Perplexity: the figures are those of a plain forward pass, and the paper's propositions hold at every token."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import LoadedModel
from nvium_core.evaluation.perplexity import evaluate, exit_losses
from nvium_core.evaluation.predictions import window_predictions
from tests.byte_model import load_byte_model
from tests.random_models import random_model

TOKENS = st.lists(st.integers(0, 16), min_size=4, max_size=20)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model()


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


ROUNDED_UP = 1 + 1e-12
"""Where one exit is best at every token, the oracle's sum is that exit's in another order."""


@given(TOKENS, st.integers(0, 5))
def test_the_papers_propositions_hold_at_every_token(ids: list[int], seed: int) -> None:
    found = window_predictions(random_model([1, 2, 4], seed=seed), ids, 1)
    figures = exit_losses(found)
    assert figures["bound_violations"] == figures["mass_violations"] == 0
    assert figures["oracle_perplexity"] <= ROUNDED_UP * min(figures["exit_perplexities"])
    assert figures["oracle_perplexity"] <= ROUNDED_UP * float(found.mix_nll.mean().exp())


def test_the_propositions_hold_in_float32_where_one_token_is_nearly_certain() -> None:
    """8,191 tokens of 5e-8 each: less than half a unit in the last place of the one that they are added to."""
    tail, model = 5e-8, random_model([1, 2, 4], vocab_size=8192, dtype=torch.float32)
    model.lm_head = torch.nn.Linear(16, 8192)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(0).index_fill_(0, torch.tensor(5), -math.log(tail))
        tail = math.exp(-float(model.lm_head.bias[5]))
    found = window_predictions(model, [1, 5, 2, 5, 3], 1)
    assert exit_losses(found)["bound_violations"] == exit_losses(found)["mass_violations"] == 0
    exact = [math.log1p(8191 * tail) - math.log(p) for p in (1, tail, 1, tail)]
    for nll_T in (*found.exit_nll.unbind(-1), found.mix_nll, found.explicit_nll):
        assert nll_T.tolist() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("spread", [2.5, 4, 32])
def test_the_propositions_hold_in_float32_however_improbable_the_text(spread: float) -> None:
    model = random_model([1, 2, 4], vocab_size=257, dtype=torch.float32, spread=spread)
    found = window_predictions(model, list(range(0, 250, 5)), 1)
    assert float(found.mix_nll.max()) > 104, "e^-loss is 0 in float32"
    figures = exit_losses(found)
    assert figures["bound_violations"] == figures["mass_violations"] == 0
    torch.testing.assert_close(found.explicit_nll, found.mix_nll, rtol=1e-12, atol=1e-6)


def test_a_mixture_outside_its_exits_is_counted() -> None:
    sound = window_predictions(random_model([1, 2, 4]), [1, 2, 3, 4], 1)
    heavy = replace(sound, explicit_nll=sound.explicit_nll - 5)
    assert exit_losses(heavy)["bound_violations"] == 3
    assert exit_losses(replace(sound, mass=sound.mass + 0.1))["mass_violations"] == 3


def test_the_oracle_takes_each_token_from_its_best_exit() -> None:
    found = window_predictions(random_model([1, 2, 4]), [1, 2, 3, 4], 1)
    best = [min(row) for row in found.exit_nll.tolist()]
    assert exit_losses(found)["oracle_perplexity"] == pytest.approx(math.exp(sum(best) / 3))


def test_a_model_without_early_exits_is_evaluated_too() -> None:
    dense = load_byte_model()
    figures = evaluate(random_model([3], vocab_size=257), dense.tokenizer, ["A fox, two hens."])
    assert figures.perplexity == pytest.approx(figures.oracle_perplexity)
    assert figures.exit_perplexities == pytest.approx([figures.perplexity])
    assert (figures.exit_shares, figures.mean_depth, figures.router_quantiles) == ([1.0], 1.0, [])


def test_each_documents_tokens_and_loss_are_its_own(loaded: LoadedModel) -> None:
    documents = ["A fox, two hens.", "x" * 200, "Nobody."]
    whole = evaluate(loaded.model, loaded.tokenizer, documents)
    alone = [evaluate(loaded.model, loaded.tokenizer, [document]) for document in documents]
    assert whole.document_tokens == [each.num_tokens for each in alone]
    assert whole.document_losses == pytest.approx([each.document_losses[0] for each in alone], abs=2e-4)
    assert sum(whole.document_losses) == pytest.approx(math.log(whole.perplexity) * whole.num_tokens, abs=1e-3)
