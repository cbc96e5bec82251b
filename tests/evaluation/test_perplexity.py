import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.evaluation import perplexity as module
from nvium_core.evaluation.perplexity import (
    Predictions,
    Window,
    at_threshold,
    empty_predictions,
    evaluate,
    predictions,
    routing,
    text_windows,
)
from nvium_core.model.nvium import Nvium
from tests.byte_model import load_byte_model, token_ids
from tests.random_models import random_model

TOKENS = st.lists(st.integers(0, 16), min_size=4, max_size=20)


def test_a_short_document_is_scored_like_one_forward_pass(byte_model):
    text = "A fox, two hens."
    end = byte_model.tokenizer.eos_token_id
    ids = torch.tensor([[end, *byte_model.tokenizer.encode(text, add_special_tokens=False), end]])
    with torch.no_grad():
        out = byte_model.model(ids, labels=ids)
    figures = evaluate(byte_model.model, byte_model.tokenizer, [text])
    assert figures["num_tokens"] == ids.shape[1] - 1
    assert figures["perplexity"] == pytest.approx(float(out.mix_loss.exp()), rel=1e-5)
    assert figures["oracle_perplexity"] <= min(figures["exit_perplexities"]) * (1 + 1e-12)
    assert figures["exit_perplexities"] == pytest.approx(out.exit_losses.exp().tolist(), rel=1e-5)
    assert figures["exit_shares"] == pytest.approx(out.exit_probs[0, :-1].mean(0).tolist(), rel=1e-5)
    assert figures["mean_depth"] == pytest.approx(float(out.compute_loss), rel=1e-5)
    nats = math.log(figures["perplexity"]) * figures["num_tokens"]
    assert figures["bits_per_character"] == pytest.approx(nats / len(text) / math.log(2))


ROUNDING = 1e-5  # in nats: float32 routers cause errors of 2e-7


@given(TOKENS, st.integers(0, 5))
def test_the_loss_of_the_mixture_is_between_those_of_its_exits(ids, seed):
    assert_bounded(window_predictions(random_model([1, 2, 4], seed=seed), ids, 1))


def assert_bounded(found: Predictions) -> None:
    """ℓ_mix is within min ℓ_k and max ℓ_k (paper, Proposition 2)."""
    assert bool((found.exit_nll.amin(-1) <= found.mix_nll + ROUNDING).all())
    assert bool((found.mix_nll <= found.exit_nll.amax(-1) + ROUNDING).all())


def test_the_losses_are_exact_in_float32_where_one_token_is_nearly_certain():
    """8,191 tokens of 5e-8 each: less than half an ulp of the probability that they are added to."""
    tail, model = 5e-8, random_model([1, 2, 4], vocab_size=8192, dtype=torch.float32)
    model.lm_head = torch.nn.Linear(16, 8192)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(0).index_fill_(0, torch.tensor(5), -math.log(tail))
        tail = math.exp(-float(model.lm_head.bias[5]))
    found = window_predictions(model, [1, 5, 2, 5, 3], 1)
    exact = [math.log1p(8191 * tail) - math.log(p) for p in (1, tail, 1, tail)]
    for nll_T in (*found.exit_nll.unbind(-1), found.mix_nll):
        assert nll_T.tolist() == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("spread", [2.5, 4, 32])
def test_the_loss_of_the_mixture_is_bounded_in_float32_however_improbable_the_text(spread):
    model = random_model([1, 2, 4], vocab_size=257, dtype=torch.float32, spread=spread)
    found = window_predictions(model, list(range(0, 250, 5)), 1)
    assert float(found.mix_nll.max()) > 104, "e^-loss is 0 in float32"
    assert_bounded(found)


def test_tokens_and_loss_of_each_document_are_independent(byte_model):
    documents = ["A fox, two hens.", "x" * 200, "Nobody."]
    whole = evaluate(byte_model.model, byte_model.tokenizer, documents)
    alone = [evaluate(byte_model.model, byte_model.tokenizer, [document]) for document in documents]
    assert whole["document_tokens"] == [each["num_tokens"] for each in alone]
    assert whole["document_losses"] == pytest.approx([each["document_losses"][0] for each in alone], abs=2e-4)
    assert sum(whole["document_losses"]) == pytest.approx(math.log(whole["perplexity"]) * whole["num_tokens"], abs=1e-3)


def test_a_threshold_evaluates_the_exits_that_it_chooses():
    found = window_predictions(random_model([1, 2, 4], seed=5), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 1)
    (early, middle, last) = (at_threshold(found, q, [1, 2, 4]) for q in (1e-9, 0.2, 1))
    assert (early["exit_shares"], last["exit_shares"]) == ([1, 0, 0], [0, 0, 1])
    assert (early["mean_depth"], last["mean_depth"]) == (0.25, 1)
    assert early["perplexity"] == pytest.approx(float(found.exit_nll[:, 0].mean().exp()))
    assert last["perplexity"] == pytest.approx(float(found.exit_nll[:, 2].mean().exp()))
    chosen = [next(k for k, p in enumerate(row) if p >= 0.2) for row in found.log_p.exp().cumsum(-1).tolist()]
    assert len({*chosen}) > 1
    assert middle["exit_shares"] == pytest.approx([chosen.count(k) / len(chosen) for k in range(3)])
    losses = [float(found.exit_nll[t, k]) for t, k in enumerate(chosen)]
    assert math.log(middle["perplexity"]) == pytest.approx(sum(losses) / len(losses))


def test_shares_posteriors_and_entropy_equal_plain_sums():
    seen = window_predictions(random_model([1, 2, 4], seed=5), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 1)
    figures = routing(seen, [1, 2, 4])
    p_TE, pi_TE = seen.log_p.exp(), seen.exit_nll.neg().exp()
    posterior_TE = p_TE * pi_TE / (p_TE * pi_TE).sum(-1, keepdim=True)
    assert figures["exit_shares"] == pytest.approx(p_TE.mean(0).tolist())
    assert figures["exit_posteriors"] == pytest.approx(posterior_TE.mean(0).tolist())
    assert figures["routing_entropy"] == pytest.approx(float(-(p_TE * p_TE.log()).sum(-1).mean()))
    assert figures["mean_depth"] == pytest.approx(float((p_TE * torch.tensor([0.25, 0.5, 1])).sum(-1).mean()))


def window_predictions(model: Nvium, ids: list[int], first_target: int) -> Predictions:
    """Predict the targets ids[first_target:] in a single window."""
    found = empty_predictions(len(ids) - first_target, model.config.num_exits)
    module.predict_window(model, Window(0, ids, first_target), found, 0)
    return found


@given(st.integers(2, 400), st.integers(2, 64))
def test_every_token_but_the_first_is_a_target_exactly_once(num_tokens, context):
    targets: list[int] = []
    for start, first_target, stop in module.windows(num_tokens, context):
        assert 0 <= start < first_target < stop <= num_tokens
        assert stop - start - 1 <= context
        assert first_target == 1 or first_target - start >= context // 2
        targets += range(first_target, stop)
    assert targets == list(range(1, num_tokens))


@pytest.mark.parametrize("exit_layers", [[1, 2, 4], [3]])
@pytest.mark.parametrize("chunk_rows", [2, 128])
def test_predictions_equal_the_models_forward_pass(monkeypatch, exit_layers, chunk_rows):
    monkeypatch.setattr(module, "CHUNK_ROWS", chunk_rows)
    model, ids = random_model(exit_layers, seed=3), [0, 5, 9, 1, 16, 2, 2, 11]
    found = window_predictions(model, ids, first_target=3)
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_exit_logits=True)
    log_mixture_TV, targets_T = out.logits[0, 2:-1], torch.tensor(ids[3:])
    rows = torch.arange(len(targets_T))
    torch.testing.assert_close(found.mix_nll, -log_mixture_TV[rows, targets_T])
    torch.testing.assert_close(found.exit_nll, -out.exit_logits[0, 2:-1].log_softmax(-1)[rows, :, targets_T])
    torch.testing.assert_close(found.log_p.exp(), out.exit_probs[0, 2:-1])


def test_every_token_of_a_long_document_is_in_a_window():
    loaded = load_byte_model(context=16)
    documents = ["A fox.", "", "Two hens went to see a third, who was not in."]
    found = predictions(loaded.model, loaded.tokenizer, documents)
    assert found.document.bincount().tolist() == [len(token_ids(text)) + 1 for text in documents]
    assert len(list(text_windows(loaded.tokenizer, documents, 16))) > len(documents)
