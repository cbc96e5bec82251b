"""The most characters of a text that a number of tokens can encode."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from nvium_core.text.token_bytes import longest_token
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer, byte_tokenizer

PIECES = [bytes([byte]) for byte in range(256)]


@given(st.lists(st.text() | st.sampled_from(["aaaa", END_OF_TEXT])).map("".join))
def test_no_text_is_longer_than_its_tokens_allow(text: str) -> None:
    for tokenizer in (byte_tokenizer(), byte_level_tokenizer([*PIECES, b"aaaa", "ä€".encode()])):
        longest = longest_token(tokenizer)
        assert longest is not None
        assert len(text) <= longest * len(tokenizer.encode(text).ids)


def test_there_is_no_bound_if_tokenizing_drops_text():
    stripping, before_special = byte_tokenizer(), byte_tokenizer()
    assert longest_token(stripping) == len(END_OF_TEXT)
    stripping.normalizer = normalizers.Strip()
    before_special.add_special_tokens([AddedToken("<x>", lstrip=True)])
    assert longest_token(stripping) is longest_token(before_special) is None
