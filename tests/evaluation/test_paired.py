"""Speed ratios: medians of pairs, and an interval that tells a difference from noise."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.evaluation.paired import perplexity_gain
from research.speed import mean_ratio, pairwise, ratio_interval

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


def test_intervals_resample_works_whose_chapters_agree() -> None:
    """Chapters of a work gain or lose together: by chapter the gain seems certain, by work it is not."""
    works = [f"work {number // 10}" for number in range(40)]
    leads = [-3.0 if number < 10 else 3.0 for number in range(40)]
    dense, ours = losses(*[300.0] * 40), losses(*(300 - lead for lead in leads))
    low, _ = perplexity_gain(ours, dense)["perplexity_gain_interval_percent"]
    wide, _ = perplexity_gain(ours | {"document_works": works}, dense)["perplexity_gain_interval_percent"]
    assert wide < 0 < low
