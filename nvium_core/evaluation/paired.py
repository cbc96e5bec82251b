"""Compares the perplexity of two models on the same documents, with a paired bootstrap interval of 95%.

Documents of one work, such as the chapters of a book, are resampled together. A difference whose interval contains zero
is called level.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nvium_core.bench.figures import Figures
from nvium_core.training.caveats import caveats

RESAMPLES = 2000
MIN_PAIRS = 3  # fewer pairs have no interval

Interval = tuple[float, float]

Sample = NDArray[np.int64]
"""Bootstrap samples of a group of pairs: indices of the pairs that are drawn, [RESAMPLES, number of pairs]."""


def interval(counts: Sequence[int], statistic: Callable[[list[Sample]], NDArray[np.float64]]) -> Interval | None:
    """Return the 95% bootstrap interval of a statistic. Return None if a group has fewer than `MIN_PAIRS` pairs.

    counts: number of pairs in each group.
    statistic: takes one `Sample` per group, returns RESAMPLES values.
    """
    if min(counts) < MIN_PAIRS:
        return None
    rng = np.random.default_rng(0)
    found = statistic([rng.integers(0, count, (RESAMPLES, count)) for count in counts])
    low, high = np.percentile(found, (2.5, 97.5)).tolist()
    return low, high


def perplexity_gain(ours: Figures, dense: Figures) -> Figures:
    """Return by how many percent our perplexity is below the dense model's, with a confidence interval and caveats."""
    found = None
    if ours.get("document_tokens") == dense.get("document_tokens") and "document_losses" in dense:
        works = ours.get("document_works")
        tokens = by_work(dense["document_tokens"], works)
        lead = by_work(np.asarray(dense["document_losses"]) - np.asarray(ours["document_losses"]), works)
        found = interval(
            [len(tokens)],
            lambda samples: 100 * (1 - np.exp(-lead[samples[0]].sum(1) / tokens[samples[0]].sum(1))),
        )
    return {
        "perplexity_gain_percent": 100 * (1 - ours["perplexity"] / dense["perplexity"]),
        "perplexity_gain_interval_percent": found and list(found),
        "caveats": caveats({**ours, "twin": dense}),
    }


def by_work(by_document: Sequence[float] | NDArray[np.float64], works: Sequence[str] | None) -> NDArray[np.float64]:
    """Sum values over the documents of each work. If `works` is None, each document is a work."""
    values = np.asarray(by_document, dtype=np.float64)
    if works is None:
        return values
    _, numbers = np.unique(np.asarray(works), return_inverse=True)
    return np.bincount(numbers, weights=values).astype(np.float64)


def perplexity_price(ours: Figures, other: Figures) -> Figures:
    """Return by how many percent our perplexity is above the other model's, with a confidence interval."""
    gain = perplexity_gain(ours, other)
    bounds = gain["perplexity_gain_interval_percent"]
    return {
        "price_percent": -gain["perplexity_gain_percent"],
        "price_interval_percent": bounds and [-bound for bound in reversed(bounds)],
    }


def with_interval(value: str, bounds: Sequence[float] | None, level: float) -> str:
    """Format a value and its interval. Add ": level" if `level`, the value for no difference, is in the interval."""
    if not bounds:
        return value
    low, high = bounds
    return f"{value} ({low:.3g} to {high:.3g}{': level' if low <= level <= high else ''})"
