import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.evaluation import predictions as module
from nvium_core.evaluation.predictions import Predictions, Window, empty_predictions, predictions, text_windows
from nvium_core.model.nvium import Nvium
from tests.byte_model import load_byte_model, token_ids
from tests.random_models import random_model


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
