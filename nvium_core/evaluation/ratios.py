"""How many times as fast: ratios of answers spoken in turn, and how far they can be trusted.

A category's ratio is the median over its pairs, the whole the mean over categories.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np

RESAMPLES = 2000
LEVEL = 95
FEWEST_PAIRS = 3

Ratios = Mapping[str, Sequence[float]]
"""By category, the other's time over ours for every pair."""

Interval = tuple[float, float]


def pairwise(others: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [other / our for other, our in zip(others, ours, strict=True)]


def mean_ratio(ratios: Ratios) -> float:
    return fmean(median(of_category) for of_category in ratios.values())


def ratio_interval(ratios: Ratios) -> Interval | None:
    """What the ratio is between in 95% of bootstrap samples of each category's pairs; None if one has fewer than
    three. Answers to the same prompt count as independent."""
    if min(map(len, ratios.values())) < FEWEST_PAIRS:
        return None
    rng = np.random.default_rng(0)
    medians = [
        np.median(rng.choice(np.asarray(of_category), (RESAMPLES, len(of_category))), axis=1)
        for of_category in ratios.values()
    ]
    low, high = np.percentile(np.mean(medians, axis=0), (50 - LEVEL / 2, 50 + LEVEL / 2)).tolist()
    return low, high


def speed_up_percent(ratios: Ratios) -> dict[str, float | list[float] | None]:
    """For an evaluation's JSON: by how many percent ours is faster, and the interval of that."""
    interval = ratio_interval(ratios)
    return {
        "speed_up_percent": 100 * (mean_ratio(ratios) - 1),
        "speed_up_interval_percent": interval and [100 * (bound - 1) for bound in interval],
    }


def resolved(value: str, interval: Sequence[float] | None, nothing: float) -> str:
    """A figure for a table, beside its interval; marked where that reaches to both sides of no difference."""
    if not interval:
        return value
    low, high = interval
    return f"{value} ({low:.4g} to {high:.4g}{', not resolved' if low <= nothing <= high else ''})"
