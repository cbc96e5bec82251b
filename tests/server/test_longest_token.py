"""How much text a token may stand for decides what is refused before it is tokenized: too little refuses too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from nvium_core.text.token_bytes import longest_token
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer, byte_tokenizer

PIECES = [bytes([byte]) for byte in range(256)]


@given(st.lists(st.text() | st.sampled_from(["aaaa", END_OF_TEXT])).map("".join))
def test_no_text_has_fewer_tokens_than_its_length_allows(text: str) -> None:
    for tokenizer in (byte_tokenizer(), byte_level_tokenizer([*PIECES, b"aaaa", "ä€".encode()])):
        longest = longest_token(tokenizer)
        assert longest is not None
        assert len(text) <= longest * len(tokenizer.encode(text).ids)


def normalizing(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<x>", lstrip=True)])


@pytest.mark.parametrize("change", [normalizing, swallowing])
def test_where_tokens_leave_out_some_of_a_text_nothing_is_known(change: object) -> None:
    tokenizer = byte_tokenizer()
    assert longest_token(tokenizer) == len(END_OF_TEXT)
    change(tokenizer)  # type: ignore[operator]
    assert longest_token(tokenizer) is None
