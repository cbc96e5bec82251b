"""`longest_token` bounds the characters of a token, so a text that cannot fit is refused without tokenizing it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from nvium_core.text.token_bytes import longest_token
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer, byte_tokenizer

PIECES = [bytes([byte]) for byte in range(256)]


@given(st.lists(st.text() | st.sampled_from(["aaaa", END_OF_TEXT])).map("".join))
def test_no_text_is_longer_than_its_tokens_allow(text: str) -> None:
    for tokenizer in (byte_tokenizer(), byte_level_tokenizer([*PIECES, b"aaaa", "ä€".encode()])):
        longest = longest_token(tokenizer)
        assert longest is not None
        assert len(text) <= longest * len(tokenizer.encode(text).ids)


def strip_text(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def strip_before_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<x>", lstrip=True)])


@pytest.mark.parametrize("change", [strip_text, strip_before_special])
def test_there_is_no_bound_if_tokenizing_drops_text(change: object) -> None:
    tokenizer = byte_tokenizer()
    assert longest_token(tokenizer) == len(END_OF_TEXT)
    change(tokenizer)  # type: ignore[operator]
    assert longest_token(tokenizer) is None
