"""Is a token said with probability 0.8 right eight times in ten? Reliability of π_mix's most probable token.

Shapes: T tokens, Q bins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_core.evaluation.predictions import Predictions

BINS = 15


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Of the tokens whose most probable candidate had a probability of the same bin: how many, that probability on
    average, and how often the candidate came."""

    num_tokens: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`accuracy` is how often the argmax of π_mix came. `calibration_error` is the expected calibration error: the mean
    of |confidence − accuracy| over tokens, by bins of equal width. Bins without tokens are left out."""

    accuracy: float
    calibration_error: float
    reliability: list[Reliability]


class CalibrationTotals:
    """Running totals over windows."""

    def __init__(self) -> None:
        self.num_tokens_Q = torch.zeros(BINS, dtype=torch.float64)
        self.confidence_Q = torch.zeros(BINS, dtype=torch.float64)
        self.num_right_Q = torch.zeros(BINS, dtype=torch.float64)

    def add(self, predictions: Predictions) -> None:
        bin_T = (predictions.top_prob * BINS).long().clamp(max=BINS - 1)
        self.num_tokens_Q += per_bin(bin_T, torch.ones_like(predictions.top_prob))
        self.confidence_Q += per_bin(bin_T, predictions.top_prob)
        self.num_right_Q += per_bin(bin_T, predictions.top_is_target)

    def figures(self) -> Calibration:
        num_tokens = float(self.num_tokens_Q.sum())
        gap_Q = (self.confidence_Q - self.num_right_Q).abs()
        totals = zip(self.num_tokens_Q.tolist(), self.confidence_Q.tolist(), self.num_right_Q.tolist(), strict=True)
        return Calibration(
            accuracy=float(self.num_right_Q.sum()) / num_tokens,
            calibration_error=float(gap_Q.sum()) / num_tokens,
            reliability=[
                Reliability(num_tokens=int(count), confidence=confidence / count, accuracy=num_right / count)
                for count, confidence, num_right in totals
                if count
            ],
        )


def per_bin(bin_T: Tensor, value_T: Tensor) -> Tensor:
    """Sums of values by bin, [Q]."""
    return torch.zeros(BINS, dtype=torch.float64).index_add(0, bin_T, value_T)
