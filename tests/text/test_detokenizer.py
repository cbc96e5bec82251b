from hypothesis import given, strategies
from tokenizers import Tokenizer, decoders, models

from nvium_core.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from tests.byte_model import byte_level_tokenizer, byte_tokenizer, token_ids
from tests.text.chunks import chunks

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
