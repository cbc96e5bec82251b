"""Speed ratios: medians of pairs, and an interval that tells a difference from noise."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.evaluation.paired import (
    category_rate_ratio,
    category_rate_ratio_interval,
    mean_ratio,
    pairwise,
    perplexity_gain,
    rate_ratio,
    rate_ratio_interval,
    ratio_interval,
    resolved,
    speed_up_percent,
)

RATIOS = st.dictionaries(st.text(max_size=3), st.lists(st.floats(0.1, 10), min_size=3, max_size=9), min_size=1)


def test_the_ratio_is_the_median_over_pairs_and_the_mean_over_categories() -> None:
    ratios = {"qa": pairwise([3, 900, 2.5], [2, 2, 2]), "math": pairwise([10], [4])}
    assert mean_ratio(ratios) == pytest.approx((1.5 + 2.5) / 2)


@given(RATIOS)
def test_the_interval_is_within_the_pairs(ratios: dict[str, list[float]]) -> None:
    found = ratio_interval(ratios)
    assert found is not None
    rounding = 1 + 1e-12
    assert min(map(min, ratios.values())) / rounding <= found[0] <= found[1]
    assert found[1] <= max(map(max, ratios.values())) * rounding


def test_the_interval_of_an_even_spread_is_around_the_ratio() -> None:
    ratios = {"qa": [0.8, 0.9, 1.0, 1.1, 1.2] * 4}
    found = ratio_interval(ratios)
    assert found is not None
    assert 0.8 < found[0] < mean_ratio(ratios) < found[1] < 1.2


def test_few_pairs_have_no_interval() -> None:
    assert ratio_interval({"qa": [1.0, 2.0, 3.0], "math": [1.0, 2.0]}) is None


def test_more_pairs_of_the_same_spread_narrow_the_interval() -> None:
    few, many = (ratio_interval({"qa": [0.9, 1.0, 1.1, 1.2, 1.3] * number}) for number in (1, 20))
    assert few is not None and many is not None
    assert many[1] - many[0] < few[1] - few[0]


def test_what_reaches_to_both_sides_of_no_difference_is_level() -> None:
    assert resolved("1.030", (0.98, 1.07), nothing=1) == "1.030 (0.98 to 1.07: level)"
    assert resolved("1.030", (1.01, 1.07), nothing=1) == "1.030 (1.01 to 1.07)"
    assert resolved("1.030", None, nothing=1) == "1.030"


def test_a_speed_up_is_in_percent_with_its_interval() -> None:
    figures = speed_up_percent({"qa": [1.25] * 5})
    assert figures == {"speed_up_percent": 25, "speed_up_interval_percent": [25, 25]}


def losses(*of_documents: float) -> dict[str, Any]:
    """Of documents of a hundred tokens each."""
    tokens = [100] * len(of_documents)
    perplexity = math.exp(sum(of_documents) / sum(tokens))
    return {"perplexity": perplexity, "document_tokens": tokens, "document_losses": list(of_documents)}


def test_a_gain_that_every_document_shows_is_resolved_however_documents_differ() -> None:
    dense = [300.0, 900.0, 150.0, 420.0, 777.0] * 4
    found = perplexity_gain(losses(*(loss - 2 for loss in dense)), losses(*dense))
    assert found["perplexity_gain_percent"] == pytest.approx(100 * (1 - math.exp(-0.02)))
    assert found["perplexity_gain_interval_percent"] == pytest.approx([100 * (1 - math.exp(-0.02))] * 2)


def test_a_gain_that_documents_do_not_agree_about_reaches_to_both_sides_of_none() -> None:
    dense = [300.0] * 20
    found = perplexity_gain(losses(*(300 - lead for lead in [5, -5, 4, -4, 1] * 4)), losses(*dense))
    low, high = found["perplexity_gain_interval_percent"]
    assert low < 0 < found["perplexity_gain_percent"] < high


def test_without_losses_by_document_a_gain_has_no_interval() -> None:
    found = perplexity_gain({"perplexity": 9.0}, {"perplexity": 10.0})
    assert found == {"perplexity_gain_percent": pytest.approx(10), "perplexity_gain_interval_percent": None}


def test_the_papers_ratio_is_of_all_tokens_over_all_seconds_together_or_by_category() -> None:
    ours = {"qa": [(10, 1.0), (30, 1.0)], "math": [(10, 2.0)]}
    dense = {"qa": [(10, 2.0), (10, 2.0)], "math": [(10, 1.0)]}
    assert rate_ratio(ours, dense) == pytest.approx((50 / 4) / (30 / 5))
    assert category_rate_ratio(ours, dense) == pytest.approx((20 / 5 + 5 / 10) / 2)
    assert rate_ratio_interval(ours, dense) is category_rate_ratio_interval(ours, dense) is None


def test_intervals_of_the_papers_ratios_follow_the_pairs() -> None:
    ours = {"qa": [(10, 1.0)] * 5, "math": [(10, 4.0)] * 3}
    dense = {"qa": [(10, 2.0)] * 5, "math": [(10, 4.0)] * 3}
    assert rate_ratio_interval(ours, dense) == pytest.approx((22 / 17, 22 / 17))
    assert category_rate_ratio_interval(ours, dense) == pytest.approx((1.5, 1.5))
    noisy = ours | {"qa": [(10, seconds) for seconds in (1.0, 3.0, 2.0, 2.5, 1.5)]}
    found = rate_ratio_interval(noisy, dense)
    assert found is not None and found[0] < rate_ratio(noisy, dense) < found[1]
