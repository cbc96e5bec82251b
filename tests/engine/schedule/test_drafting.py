import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.engine.schedule.drafting import (
    INITIAL_HIT_RATES,
    LENGTHS,
    MAX_LOOKBACK,
    PRIOR_WEIGHT,
    HitRates,
    Match,
    Ngrams,
    continuation,
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


def found(match: Match | None) -> tuple[int, int] | None:
    return match and match[:2]


@given(texts, st.data())
def test_matches_equal_a_slow_search_however_the_text_grows(token_ids, data):
    ngrams, stop = Ngrams(HitRates()), 0
    while stop < len(token_ids):
        stop = data.draw(st.integers(stop + 1, len(token_ids)))
        assert found(ngrams.find(token_ids, stop)) == slowly(token_ids[:stop])


@given(texts, texts)
def test_the_hit_rate_combines_this_text_with_others_as_prior(token_ids, other):
    hit_rates = HitRates()
    for text in (other, token_ids):
        ngrams, seen = Ngrams(hit_rates), dict.fromkeys(LENGTHS, (0, 0))
        for stop in range(1, len(text)):
            if match := ngrams.find(text, stop):
                found_, right = seen[match.length]
                expected = (right + PRIOR_WEIGHT * hit_rates[match.length]) / (found_ + PRIOR_WEIGHT)
                assert match.hit_rate == pytest.approx(expected)
                seen[match.length] = found_ + 1, right + (text[match.end] == text[stop])


def test_measured_hit_rates_replace_the_initial_ones():
    hit_rates = HitRates()
    assert [hit_rates[length] for length in LENGTHS] == [INITIAL_HIT_RATES[length] for length in LENGTHS]
    for _ in range(2000):
        hit_rates.learn(8, False)
        hit_rates.learn(1, True)
    assert hit_rates[8] < 0.02
    assert hit_rates[1] > 0.98


def test_drafts_after_the_text_and_rows_before_the_lookback_limit_are_ignored():
    ngrams = Ngrams(HitRates())
    assert found(ngrams.find([1, 2, 3, 1, 9, 9, 9, 9], 4)) == (1, 1)
    assert found(ngrams.find([1, 2, 3, 1, 2], 5)) == (2, 2)
    far, near = [7, 8], [5, 6]
    text = [*far, *range(100, 100 + MAX_LOOKBACK), *near, *far]
    assert Ngrams(HitRates()).find(text, len(text)) is None
    assert found(Ngrams(HitRates()).find([*text, *near], len(text) + 2)) == (2, len(text) - 2)


def test_a_copy_repeats_a_text_that_is_too_short():
    assert continuation([4, 1, 2, 1, 2], 3, 5, 5) == [1, 2, 1, 2, 1]
    assert continuation([3, 1, 2, 5, 3], 1, 5, 3) == [1, 2, 5]
