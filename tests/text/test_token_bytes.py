"""The bytes of tokens, and the most characters of a text that a number of tokens can encode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from nvium_core.loading import bundled_model
from nvium_core.text.gguf_tokenizer import gguf_tokenizer
from nvium_core.text.token_bytes import TokenBytes, longest_token
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer, byte_tokenizer
from tests.text.test_gguf_tokenizer import sentence_piece_fields

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


LIKE_MARKERS = [b"\xff", b"\xffabc", b"a\xff", b"\xff[12]", b"\xff\xff"]
"""Pieces that look like llguidance's marker."""


@pytest.mark.parametrize("pieces", [PIECES, LIKE_MARKERS], ids=["all bytes", "markers"])
def test_the_bytes_of_a_token_are_those_of_its_piece(pieces):
    expected = [END_OF_TEXT.encode(), *pieces, b""]
    found = TokenBytes(byte_level_tokenizer(pieces))
    assert [found[number] for number in range(len(expected))] == expected


def bundled() -> Tokenizer:
    return Tokenizer.from_file(str(bundled_model() / "tokenizer.json"))


def byte_fallback() -> Tokenizer:
    return gguf_tokenizer(sentence_piece_fields().get).backend_tokenizer


@pytest.mark.parametrize("build", [bundled, byte_fallback, byte_tokenizer])
def test_the_bytes_of_all_tokens_are_those_of_llguidance(build):
    tokenizer = build()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("▁▁▁", "  ", "Ġé", "é中")])
    tokenizer.add_special_tokens(["<▁>", "<Ġé>"])
    found, theirs = TokenBytes(tokenizer), LLTokenizer(tokenizer.to_str(), None, [0])
    marker = b"\xff"  # llguidance returns no bytes for it
    for number in range(tokenizer.get_vocab_size()):
        assert found[number] == (theirs.decode_bytes([number]) or marker)


def test_the_bytes_of_a_token_with_foreign_characters_are_those_of_its_text():
    tokenizer = Tokenizer(models.BPE({"a b": 0, "é中": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert [TokenBytes(tokenizer)[number].decode() for number in range(2)] == ["a b", "é中"]
    assert [tokenizer.decode([number]) for number in range(2)] == ["a b", "é中"]
