"""Prompt lookup against a slow search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.engine.schedule.ngrams import (
    FIRST_GUESSES,
    GUESS_WEIGHT,
    LENGTHS,
    MAX_LOOKBACK,
    Find,
    Ngrams,
    Shares,
    continued,
)

texts = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def slowly(token_ids: list[int]) -> tuple[int, int] | None:
    """Return the length and the latest earlier end of the longest n-gram."""
    stop = len(token_ids)
    for length in LENGTHS:
        for end in range(stop - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[stop - length :]:
                return length, end
    return None


def found(find: Find | None) -> tuple[int, int] | None:
    return find and find[:2]


@given(texts, st.data())
def test_matches_equal_a_slow_search_however_the_text_grows(token_ids: list[int], data: st.DataObject) -> None:
    ngrams, stop = Ngrams(Shares()), 0
    while stop < len(token_ids):
        stop = data.draw(st.integers(stop + 1, len(token_ids)))
        assert found(ngrams.find(token_ids, stop)) == slowly(token_ids[:stop])


@given(texts, texts)
def test_the_hit_rate_combines_this_text_with_others_as_prior(token_ids: list[int], other: list[int]) -> None:
    shares = Shares()
    for text in (other, token_ids):
        ngrams, seen = Ngrams(shares), dict.fromkeys(LENGTHS, (0, 0))
        for stop in range(1, len(text)):
            if find := ngrams.find(text, stop):
                found_, right = seen[find.length]
                expected = (right + GUESS_WEIGHT * shares[find.length]) / (found_ + GUESS_WEIGHT)
                assert find.share == pytest.approx(expected)
                seen[find.length] = found_ + 1, right + (text[find.end] == text[stop])


def test_measured_hit_rates_replace_the_initial_ones() -> None:
    shares = Shares()
    assert [shares[length] for length in LENGTHS] == [FIRST_GUESSES[length] for length in LENGTHS]
    for _ in range(2000):
        shares.learn(8, False)
        shares.learn(1, True)
    assert shares[8] < 0.02
    assert shares[1] > 0.98


def test_drafts_after_the_text_are_ignored() -> None:
    ngrams = Ngrams(Shares())
    assert found(ngrams.find([1, 2, 3, 1, 9, 9, 9, 9], 4)) == (1, 1)
    assert found(ngrams.find([1, 2, 3, 1, 2], 5)) == (2, 2)


def test_a_long_prompt_is_indexed_up_to_the_lookback_limit() -> None:
    far, near = [7, 8], [5, 6]
    text = [*far, *range(100, 100 + MAX_LOOKBACK), *near, *far]
    assert Ngrams(Shares()).find(text, len(text)) is None
    assert found(Ngrams(Shares()).find([*text, *near], len(text) + 2)) == (2, len(text) - 2)


def test_a_copy_repeats_a_text_that_is_too_short() -> None:
    assert continued([4, 1, 2, 1, 2], 3, 5, 5) == [1, 2, 1, 2, 1]
    assert continued([3, 1, 2, 5, 3], 1, 5, 3) == [1, 2, 5]
