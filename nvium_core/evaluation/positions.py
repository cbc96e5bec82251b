"""Does a model predict better the more it has read? log π_mix by the place in the window.

Shapes: T tokens, Q quarters.
"""

import math
from dataclasses import dataclass

import torch

from nvium_core.evaluation.predictions import Predictions

PARTS = 4


@dataclass(frozen=True, kw_only=True)
class PartOfContext:
    """Of the tokens that follow positions `first` to `last` of their window, counted from 0: how many, and the mean
    log π_mix."""

    first: int
    last: int
    num_tokens: int
    mean_logprob: float


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The quarters of the context, those without tokens left out."""

    by_position: list[PartOfContext]


class PositionTotals:
    """Running totals over windows of at most `context` positions."""

    def __init__(self, context: int) -> None:
        self.length = math.ceil(context / PARTS)
        self.num_tokens_Q = torch.zeros(PARTS, dtype=torch.long)
        self.logprob_Q = torch.zeros(PARTS, dtype=torch.float64)

    def add(self, predictions: Predictions) -> None:
        part_T = predictions.position // self.length
        self.num_tokens_Q.index_add_(0, part_T, torch.ones_like(part_T))
        self.logprob_Q.index_add_(0, part_T, -predictions.mix_nll)

    def figures(self) -> Positions:
        totals = zip(self.num_tokens_Q.tolist(), self.logprob_Q.tolist(), strict=True)
        return Positions(
            by_position=[
                PartOfContext(
                    first=part * self.length,
                    last=(part + 1) * self.length - 1,
                    num_tokens=count,
                    mean_logprob=logprob / count,
                )
                for part, (count, logprob) in enumerate(totals)
                if count
            ]
        )
