import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nvium_core.training.data.source import encoded, train_tokenizer
from nvium_core.training.data.texts import END_OF_TEXT
from tests.training.small_runs import WORDS

VOCAB_SIZE = 290


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([" ".join(WORDS)] * 20, VOCAB_SIZE, context=64)


@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text


def test_the_stream_has_an_end_of_text_before_every_document_and_at_the_end(tokenizer):
    end = tokenizer.eos_token_id
    whole = [*tokenizer("the cat").input_ids, *tokenizer("so it was").input_ids, end]
    for length in (1, len(whole) - 1, len(whole), 99):
        stream = [token for part in encoded(["the cat", "so it was"], tokenizer, length) for token in part]
        assert stream == whole[:length]
    [text, _] = encoded([f"the {END_OF_TEXT} cat"], tokenizer, 99)
    assert text.tolist().count(end) == 1
