"""Two models on the same documents: how much one is better, with a confidence interval.

All differences are paired; an interval holds 95% of bootstrap samples of the pairs. Documents of one work, such as the
chapters of a book, are resampled together. A difference whose interval contains zero is called level.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nvium_core.bench.harness import Figures

RESAMPLES = 2000
LEVEL = 95
MIN_PAIRS = 3

Interval = tuple[float, float]

Sample = NDArray[np.int64]
"""Pair numbers, [RESAMPLES, pairs]."""


def interval(counts: Sequence[int], statistic: Callable[[list[Sample]], NDArray[np.float64]]) -> Interval | None:
    """Bootstrap interval of a statistic over groups of pairs; None where a group has fewer than three."""
    if min(counts) < MIN_PAIRS:
        return None
    rng = np.random.default_rng(0)
    found = statistic([rng.integers(0, count, (RESAMPLES, count)) for count in counts])
    low, high = np.percentile(found, (50 - LEVEL / 2, 50 + LEVEL / 2)).tolist()
    return low, high


def perplexity_gain(ours: Figures, dense: Figures) -> Figures:
    """Percent by which our perplexity is below the dense one, with its interval over the text's works."""
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
    }


def by_work(of_documents: Sequence[float] | NDArray[np.float64], works: Sequence[str] | None) -> NDArray[np.float64]:
    """Sums over the documents of each work; without works each document is its own."""
    values = np.asarray(of_documents, dtype=np.float64)
    if works is None:
        return values
    _, numbers = np.unique(np.asarray(works), return_inverse=True)
    return np.bincount(numbers, weights=values).astype(np.float64)


def perplexity_price(ours: Figures, other: Figures) -> Figures:
    """Percent of the other's perplexity by which ours is above it, with its interval."""
    gain = perplexity_gain(ours, other)
    bounds = gain["perplexity_gain_interval_percent"]
    return {
        "price_percent": -gain["perplexity_gain_percent"],
        "price_interval_percent": bounds and [-bound for bound in reversed(bounds)],
    }


def resolved(value: str, bounds: Sequence[float] | None, nothing: float) -> str:
    """A figure for a table with its interval; marked where that contains zero."""
    if not bounds:
        return value
    low, high = bounds
    return f"{value} ({low:.3g} to {high:.3g}{': level' if low <= nothing <= high else ''})"
