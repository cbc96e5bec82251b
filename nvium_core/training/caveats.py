"""Reasons why the figures of a trained model say little.

Every description of a model has them as `caveats`. So they are in every table, figure and JSON that compares models.
"""

from collections.abc import Mapping
from typing import Any

MIN_TOKENS_PER_PARAMETER = 1
MAX_SHARE = 0.98  # of the tokens that leave at one exit


def warnings(figures: Mapping[str, Any]) -> list[str]:
    return [f"Warning: {caveat}." for caveat in caveats(figures)]


def caveats(figures: Mapping[str, Any]) -> list[str]:
    """Return the caveats of a described model and of its `twin`, each with the model's name."""
    found, shares, twin = [], figures.get("exit_shares") or [], figures.get("twin")
    if ratio := too_few_tokens(figures.get("training_tokens"), figures.get("num_parameters", 0)):
        found += [f"{figures['model']} has read {ratio}"]
    if len(shares) > 1 and (share := max(shares)) > MAX_SHARE:
        place = f"{share:.1%} of its tokens leave at exit {shares.index(share) + 1}"
        found += [f"the routers of {figures['model']} have collapsed: {place}"]
    return found + (caveats(twin) if twin else [])


def too_few_tokens(training_tokens: int | None, num_parameters: int) -> str:
    """Return in words how few tokens a model has read. Return nothing if they are enough or unknown."""
    if training_tokens is None or training_tokens >= MIN_TOKENS_PER_PARAMETER * num_parameters:
        return ""
    ratio = training_tokens / num_parameters
    return f"{ratio:.2g} tokens per parameter: too few to compare models; the paper reads 20"
