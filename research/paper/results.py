"""The paper's own results (arXiv 2605.13190), for comparison."""

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Scale:
    """A row of the scaling tables: cross-entropies in nats, speed-ups in percent."""

    million_parameters: float
    dense_loss: float
    loss: float
    theoretical_speed_up: float
    speed_up: float

    @property
    def perplexity_gain(self) -> float:
        """The perplexity reduction in percent of the dense perplexity."""
        return 100 * (1 - math.exp(self.loss - self.dense_loss))

    @property
    def mean_depth(self) -> float:
        """The mean share of the layers, of which the theoretical speed-up is the inverse."""
        return 1 / (1 + self.theoretical_speed_up / 100)


class Iso(NamedTuple):
    """A row of the isoFLOP and isoSpeed table. FLOPs are forward FLOPs per token."""

    layers: int
    num_parameters: float
    perplexity: float
    milliseconds: float
    flops: float
    tokens: float


def iso(layers: int, millions: float, perplexity: float, tokens_per_second: float, gflops: float, steps: int) -> Iso:
    """Convert a row of the paper's table. A training step reads 262,144 tokens."""
    return Iso(layers, millions * 1e6, perplexity, 1000 / tokens_per_second, gflops * 1e9, steps * 2.0**18)


ISO = {
    (36, 768): (iso(36, 311, 16.25, 48.86, 0.834, 23_731), iso(26, 233, 16.51, 48.36, 0.499, 39_646)),
    (48, 768): (iso(48, 396, 15.18, 38.80, 1.041, 30_211), iso(33, 283, 15.50, 39.23, 0.620, 50_729)),
}
"""By layers and width: a 4-vium, and the dense model with equal training FLOPs and equal speed."""

SCALES = {
    (24, 128): Scale(13, 4.357, 4.188, 24.3, 53.8),
    (24, 256): Scale(36, 3.579, 3.524, 62.3, 35.3),
    (24, 512): Scale(112, 3.103, 3.058, 45.3, 25.0),
    (24, 1024): Scale(381, 2.862, 2.840, 43.4, 23.8),
    (24, 1536): Scale(806, 2.59119, 2.59073, 56.7, 32.0),
    (6, 768): Scale(99, 3.332, 3.319, 33.3, -8.3),
    (12, 768): Scale(141, 3.135, 3.104, 41.4, 10.9),
    (24, 768): Scale(226, 2.939, 2.902, 48.0, 26.8),
    (36, 768): Scale(311, 2.826, 2.788, 53.6, 36.4),
    (48, 768): Scale(396, 2.769, 2.720, 58.2, 41.6),
}
"""Rows of the scaling tables, by the 4-vium's layers and width."""
