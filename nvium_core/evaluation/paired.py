"""Two models on the same documents or prompts: how much one is better, with a confidence interval.

All differences are paired; an interval holds 95% of bootstrap samples of the pairs. A difference whose interval
contains zero is called level.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from nvium_core.bench.harness import Figures

RESAMPLES = 2000
LEVEL = 95
MIN_PAIRS = 3

Ratios = Mapping[str, Sequence[float]]
"""By category, the other's time over ours for every pair."""

Interval = tuple[float, float]

Sample = NDArray[np.int64]
"""Pair numbers, [RESAMPLES, pairs]."""


def interval(counts: Sequence[int], statistic: Callable[[list[Sample]], NDArray[np.float64]]) -> Interval | None:
    """Of a statistic over groups of pairs, computed from the pairs of every resample; None where a group has fewer than
    three."""
    if min(counts) < MIN_PAIRS:
        return None
    rng = np.random.default_rng(0)
    found = statistic([rng.integers(0, count, (RESAMPLES, count)) for count in counts])
    low, high = np.percentile(found, (50 - LEVEL / 2, 50 + LEVEL / 2)).tolist()
    return low, high


def pairwise(others: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [other / our for other, our in zip(others, ours, strict=True)]


def mean_ratio(ratios: Ratios) -> float:
    """The mean over categories of the median over pairs."""
    return fmean(median(of_category) for of_category in ratios.values())


def ratio_interval(ratios: Ratios) -> Interval | None:
    """Answers to the same prompt count as independent."""
    values = [np.asarray(of_category) for of_category in ratios.values()]
    return interval(
        [len(of_category) for of_category in values],
        lambda samples: np.mean(
            [np.median(value[sample], axis=1) for value, sample in zip(values, samples, strict=True)], axis=0
        ),
    )


Totals = Mapping[str, Sequence[tuple[int, float]]]
"""By category, tokens and seconds of every answer."""


def rate(answers: Sequence[tuple[int, float]]) -> float:
    """All tokens over all seconds."""
    return sum(count for count, _ in answers) / sum(seconds for _, seconds in answers)


def rate_ratio(ours: Totals, others: Totals) -> float:
    """Our rate over the other's, of all categories together."""
    return rate(list(chain(*ours.values()))) / rate(list(chain(*others.values())))


def category_rate_ratio(ours: Totals, others: Totals) -> float:
    """The mean over categories of our rate over the other's."""
    return fmean(rate(ours[name]) / rate(others[name]) for name in ours)


def rate_ratio_interval(ours: Totals, others: Totals) -> Interval | None:
    return totals_interval(ours, others, lambda our_2CS, other_2CS: rates(our_2CS.sum(1)) / rates(other_2CS.sum(1)))


def category_rate_ratio_interval(ours: Totals, others: Totals) -> Interval | None:
    return totals_interval(ours, others, lambda our_2CS, other_2CS: (rates(our_2CS) / rates(other_2CS)).mean(0))


def rates(total_2: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens, seconds = total_2
    found: NDArray[np.float64] = tokens / seconds
    return found


def totals_interval(
    ours: Totals,
    others: Totals,
    statistic: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> Interval | None:
    """Of a statistic of both models' tokens and seconds by category, [2, categories, resamples]. Pairs are answers to
    the same prompt in the same trial."""

    def resampled(of: Totals, samples: list[Sample]) -> NDArray[np.float64]:
        pairs = zip(of.values(), samples, strict=True)
        return np.stack([np.asarray(answers)[sample].sum(1).T for answers, sample in pairs], axis=1)

    counts = [len(answers) for answers in ours.values()]
    return interval(counts, lambda samples: statistic(resampled(ours, samples), resampled(others, samples)))


def speed_up_percent(ratios: Ratios) -> Figures:
    """For an evaluation's JSON: by how many percent ours is faster, with its interval."""
    found = ratio_interval(ratios)
    return {
        "speed_up_percent": 100 * (mean_ratio(ratios) - 1),
        "speed_up_interval_percent": found and [100 * (bound - 1) for bound in found],
    }


def perplexity_gain(ours: Figures, dense: Figures) -> Figures:
    """By how many percent our perplexity is below the dense one, with its interval over the text's documents."""
    found = None
    if ours.get("document_tokens") == dense.get("document_tokens") and "document_losses" in dense:
        tokens = np.asarray(dense["document_tokens"])
        lead = np.asarray(dense["document_losses"]) - np.asarray(ours["document_losses"])
        found = interval(
            [len(tokens)],
            lambda samples: 100 * (1 - np.exp(-lead[samples[0]].sum(1) / tokens[samples[0]].sum(1))),
        )
    return {
        "perplexity_gain_percent": 100 * (1 - ours["perplexity"] / dense["perplexity"]),
        "perplexity_gain_interval_percent": found and list(found),
    }


def perplexity_price(ours: Figures, other: Figures) -> Figures:
    """By how many percent of the other's our perplexity is above it, with its interval."""
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
