from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nvium_core.training.data.documents import END_OF_TEXT
from nvium_core.training.data.encoding import encode
from nvium_core.training.data.tokenizer import train_tokenizer
from tests.training.small_runs import WORDS

VOCAB_SIZE = 290


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([" ".join(WORDS)] * 20, VOCAB_SIZE, context=64)


@given(text=st.text())
def test_any_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids[1:]) == text


def test_plain_auto_tokenizer_loads_a_saved_one(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Thé cat  sat.\n\n\tso 🦊 ran"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.decode(again(text).input_ids, skip_special_tokens=True) == text
    assert (again.eos_token, again.model_max_length) == (END_OF_TEXT, 64)


def test_the_stream_holds_every_document_behind_an_end_of_text(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    stream = encode(["the cat", "so it was"], tokenizer).tolist()
    assert stream == [*tokenizer("the cat").input_ids, *tokenizer("so it was").input_ids, end]


def test_the_separator_inside_a_document_does_not_split_it(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = encode([f"the {END_OF_TEXT} cat"], tokenizer).tolist()
    assert stream.count(tokenizer.eos_token_id) == 2
