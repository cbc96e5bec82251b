import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvium_core.evaluation.perplexity import Window
from research.baselines.confidence import confident_exit, evaluate_calm, predict_exits
from tests import reference
from tests.byte_model import wrapped_tokenizer
from tests.research.baselines.small_models import small_calm

MODEL = small_calm()

thresholds = st.sampled_from([0.4, 0.5, 0.6, 0.8])  # at which some leave at every exit
texts = st.permutations(range(1, 17)).map(lambda token_ids: token_ids[:9])


def by_hand(token_ids: list[int], threshold: float) -> tuple[float, int]:
    """Return −log probability of the last token, and the exit (from 0) of the row before it."""
    probs_EV = [reference.softmax(logits) for _, logits in reference.last_exits(MODEL, token_ids[:-1])]
    exit_ = next((k for k, probs in enumerate(probs_EV) if max(probs) > threshold), 2)
    return -float(torch.tensor(probs_EV[exit_][token_ids[-1]], dtype=torch.float64).log()), exit_


@settings(max_examples=20)
@given(token_ids=texts, first_target=st.integers(1, 8), threshold=thresholds)
def test_losses_of_a_known_text_equal_those_of_a_forward_pass_per_token(token_ids, first_target, threshold):
    document_T, nll_TE, confidence_TE = predict_exits(MODEL, Window(3, token_ids, first_target))
    expected = [by_hand(token_ids[: stop + 1], threshold) for stop in range(first_target, 9)]
    exit_T = confident_exit(confidence_TE, threshold)
    assert exit_T.tolist() == [exit_ for _, exit_ in expected]
    assert nll_TE.gather(-1, exit_T[:, None])[:, 0].tolist() == pytest.approx([nll for nll, _ in expected])
    assert document_T.tolist() == [3] * len(expected)


def test_a_threshold_that_no_exit_exceeds_gives_the_last_exit_and_one_that_all_exceed_the_first():
    model, tokenizer = small_calm(vocab_size=257), wrapped_tokenizer()
    first, some, last = evaluate_calm(model, tokenizer, ["A fox met two hens.", "The hens left."], [0.0, 0.6, 1.0])
    assert (first["exit_shares"], first["mean_depth"]) == ([1, 0, 0], pytest.approx(1 / 3))
    assert (last["exit_shares"], last["mean_depth"]) == ([0, 0, 1], 1)
    assert first["mean_depth"] < some["mean_depth"] < 1
    assert some["document_tokens"] == [20, 15] and sum(some["exit_shares"]) == pytest.approx(1)
