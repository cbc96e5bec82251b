import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.evaluation.paired import perplexity_gain
from research.speed.per_token import ratio_interval

RATIOS = st.dictionaries(st.text(max_size=3), st.lists(st.floats(0.1, 10), min_size=3, max_size=9), min_size=1)


@given(RATIOS)
def test_the_interval_is_within_the_pairs(ratios):
    found = ratio_interval(ratios, {category: len(of_category) for category, of_category in ratios.items()})
    rounding = 1 + 1e-12
    assert min(map(min, ratios.values())) / rounding <= found[0] <= found[1]
    assert found[1] <= max(map(max, ratios.values())) * rounding


def test_trials_of_one_prompt_have_no_interval():
    assert ratio_interval({"qa": [1.0, 1.1, 0.9, 1.2]}, {"qa": 1}) is None
    low, high = ratio_interval({"qa": [1.0, 2.0, 3.0] * 2}, {"qa": 3})
    assert low < 2 < high


def losses(*by_document: float) -> dict[str, Any]:
    """Build the figures of documents with a hundred tokens each."""
    tokens = [100] * len(by_document)
    perplexity = math.exp(sum(by_document) / sum(tokens))
    return {"perplexity": perplexity, "document_tokens": tokens, "document_losses": list(by_document)}


def test_an_equal_gain_in_every_document_has_a_narrow_interval_and_that_of_an_inconsistent_one_contains_zero():
    dense = [300.0, 900.0, 150.0, 420.0, 777.0] * 4
    found = perplexity_gain(losses(*(loss - 2 for loss in dense)), losses(*dense))
    assert found["perplexity_gain_percent"] == pytest.approx(100 * (1 - math.exp(-0.02)))
    assert found["perplexity_gain_interval_percent"] == pytest.approx([100 * (1 - math.exp(-0.02))] * 2)
    dense = [300.0] * 20
    found = perplexity_gain(losses(*(300 - lead for lead in [5, -5, 4, -4, 1] * 4)), losses(*dense))
    low, high = found["perplexity_gain_interval_percent"]
    assert low < 0 < found["perplexity_gain_percent"] < high


def test_documents_of_a_work_are_resampled_together():
    """All chapters of a work gain or lose: by chapter the gain seems certain, by work it does not."""
    works = [f"work {number // 10}" for number in range(40)]
    leads = [-3.0 if number < 10 else 3.0 for number in range(40)]
    dense, ours = losses(*[300.0] * 40), losses(*(300 - lead for lead in leads))
    low, _ = perplexity_gain(ours, dense)["perplexity_gain_interval_percent"]
    wide, _ = perplexity_gain(ours | {"document_works": works}, dense)["perplexity_gain_interval_percent"]
    assert wide < 0 < low
