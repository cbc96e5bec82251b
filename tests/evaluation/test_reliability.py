"""Calibration: confidence against what came, by bins."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.evaluation import perplexity
from nvium_core.evaluation.perplexity import CONFIDENCE_BINS as BINS
from nvium_core.evaluation.predictions import Predictions

SAID = st.lists(st.tuples(st.floats(0.01, 1), st.booleans()), min_size=1, max_size=60)


def calibration(said: list[tuple[float, bool]]) -> dict[str, Any]:
    top_prob_T = torch.tensor([probability for probability, _ in said], dtype=torch.float64)
    right_T = torch.tensor([float(is_right) for _, is_right in said], dtype=torch.float64)
    return perplexity.calibration(Predictions(*[torch.empty(0)] * 7, top_prob_T, right_T))


@given(SAID)
def test_the_error_is_the_weighted_gap_of_every_bin(said: list[tuple[float, bool]]) -> None:
    figures = calibration(said)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for probability, is_right in said:
        bins.setdefault(min(int(probability * BINS), BINS - 1), []).append((probability, is_right))
    gaps = [abs(sum(p - is_right for p, is_right in inside)) for inside in bins.values()]
    assert figures["calibration_error"] == pytest.approx(sum(gaps) / len(said))
    assert figures["accuracy"] == pytest.approx(sum(is_right for _, is_right in said) / len(said))
    assert [row["num_tokens"] for row in figures["reliability"]] == [len(inside) for _, inside in sorted(bins.items())]


def test_who_is_right_as_often_as_they_say_is_calibrated() -> None:
    assert calibration([(0.75, True)] * 3 + [(0.75, False)])["calibration_error"] == pytest.approx(0)


def test_who_is_sure_and_wrong_is_not() -> None:
    assert calibration([(0.99, False)] * 4)["calibration_error"] == pytest.approx(0.99)
