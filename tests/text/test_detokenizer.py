import pytest
from hypothesis import given, strategies
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from nvium_core.loading import bundled_model
from nvium_core.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings, TokenBytes, longest_token
from nvium_core.text.gguf_tokenizer import gguf_tokenizer
from tests.byte_model import END_OF_TEXT, byte_level_tokenizer, byte_tokenizer, token_ids
from tests.text.chunks import chunks
from tests.text.test_gguf_tokenizer import sentence_piece_fields

BYTES = byte_tokenizer()
CUTS = strategies.lists(strategies.integers(0, 40))
STOPS = strategies.lists(strategies.text("ab", min_size=1, max_size=4), max_size=4)
TEXT_PIECES = strategies.lists(strategies.text("abc", max_size=5))


def detokenized(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@given(strategies.text(), CUTS)
def test_text_is_decoded_however_it_is_split_into_tokens(text, cuts):
    pieces = chunks(text.encode(), cuts)
    vocabulary = list(dict.fromkeys(pieces))
    ids = [vocabulary.index(piece) + 1 for piece in pieces]
    assert detokenized(Detokenizer(byte_level_tokenizer(vocabulary)), ids) == text.rstrip(REPLACEMENT)


@given(strategies.text("aé中🦊", min_size=1))
def test_each_character_is_emitted_with_its_last_byte(text):
    detokenizer = Detokenizer(BYTES)
    for character in text:
        *first, last = token_ids(character)
        assert [detokenizer.push(token) for token in first] == [""] * len(first)
        assert detokenizer.push(last) == character


@given(strategies.binary())
def test_invalid_utf_8_is_decoded_like_all_at_once(data):
    ids = [byte + 1 for byte in data]
    assert detokenized(Detokenizer(BYTES), ids).rstrip(REPLACEMENT) == BYTES.decode(ids).rstrip(REPLACEMENT)


def test_a_completion_keeps_its_leading_space():
    words = Tokenizer(models.BPE({"▁a": 0, "▁b": 1}, []))
    words.decoder = decoders.Metaspace()
    assert words.decode([1]) == "b"
    assert detokenized(Detokenizer(words, [0]), [1]) == " b"


def stopped(stops: StopStrings, pieces: list[str]) -> str:
    return "".join(map(stops.push, pieces)) + stops.flush()


def obviously_stopped(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The slow reference: cut the text at the first character at which it ends with a stop string."""
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if include else end - len(max(complete, key=len))], True
    return text, False


@given(TEXT_PIECES, STOPS, strategies.booleans())
def test_text_ends_at_the_first_complete_stop_string_whatever_the_chunks(pieces, names, include):
    stops = StopStrings(names, include=include)
    expected, matched = obviously_stopped("".join(pieces), names, include)
    assert (stopped(stops, pieces), stops.matched is not None) == (expected, matched)
    assert stopped(StopStrings(names, include=include), ["".join(pieces)]) == expected


@given(TEXT_PIECES, STOPS)
def test_text_is_buffered_only_while_a_prefix_of_a_stop_string_matches(pieces, names):
    stops, given_text, sent = StopStrings(names), "", ""
    for piece in pieces:
        given_text += piece
        sent += stops.push(piece)
        if stops.matched is not None:
            break
        held = given_text[len(sent) :]
        prefixes = {name[:length] for name in names for length in range(1, len(name))}
        assert held == max((p for p in prefixes if given_text.endswith(p)), key=len, default="")


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
