"""Where a model speaks: mean p_k, how far routers are from always doing the same, and which exits were right.

Shapes: T tokens, E exits, K early exits, Q bins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_core.evaluation.predictions import Predictions
from nvium_core.model.exits import EXIT

BINS = 1000
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Means over all tokens of a text.

    `exit_shares` are the mean p_k and `mean_depth` is Σ p_k l_k / L. `exit_posteriors` are the mean p_k π_k / π_mix of
    the token that came: which exit it was most likely drawn from, had it been drawn. Trained on L_mix alone, routers
    learn to make the two equal, so that a deep exit with a posterior above its share is what β costs. `routing_entropy`
    is that of p, in nats, at most log N. Of each early exit: `router_means` of w_k, `router_deviations`, and
    `router_quantiles` at `QUANTILES`, to a thousandth.
    """

    exit_shares: list[float]
    exit_posteriors: list[float]
    mean_depth: float
    routing_entropy: float
    router_means: list[float]
    router_deviations: list[float]
    router_quantiles: list[list[float]]


class RoutingTotals:
    """Running totals over windows."""

    def __init__(self, num_exits: int) -> None:
        self.num_tokens = 0
        self.entropy = 0.0
        self.probs_E, self.posteriors_E = torch.zeros(2, num_exits, dtype=torch.float64)
        self.w_K, self.square_w_K = torch.zeros(2, num_exits - 1, dtype=torch.float64)
        self.histogram_KQ = torch.zeros(num_exits - 1, BINS, dtype=torch.long)

    def add(self, predictions: Predictions) -> None:
        p_TE, w_TK = predictions.log_p.exp(), predictions.log_w[:, :-1, EXIT].exp()
        posterior_TE = (predictions.log_p - predictions.exit_nll + predictions.mix_nll[:, None]).exp()
        self.num_tokens += len(p_TE)
        self.entropy += float(-torch.special.xlogy(p_TE, p_TE).sum())
        self.probs_E += p_TE.sum(0)
        self.posteriors_E += posterior_TE.sum(0)
        self.w_K += w_TK.sum(0)
        self.square_w_K += w_TK.square().sum(0)
        bin_TK = (w_TK * BINS).long().clamp(max=BINS - 1)
        self.histogram_KQ.scatter_add_(1, bin_TK.T, torch.ones_like(bin_TK.T))

    def figures(self, exit_layers: Sequence[int]) -> Routing:
        shares, means_K = (self.probs_E / self.num_tokens).tolist(), self.w_K / self.num_tokens
        variances_K = self.square_w_K / self.num_tokens - means_K.square()
        return Routing(
            exit_shares=shares,
            exit_posteriors=(self.posteriors_E / self.num_tokens).tolist(),
            mean_depth=sum(p * depth / exit_layers[-1] for p, depth in zip(shares, exit_layers, strict=True)),
            routing_entropy=self.entropy / self.num_tokens,
            router_means=means_K.tolist(),
            router_deviations=variances_K.clamp(min=0).sqrt().tolist(),
            router_quantiles=[quantiles(counts_Q) for counts_Q in self.histogram_KQ],
        )


def quantiles(counts_Q: Tensor) -> list[float]:
    """The middles of the bins of [0, 1] that `QUANTILES` of the counts lie in."""
    reached_Q = counts_Q.cumsum(0).double() / counts_Q.sum()
    bins = torch.searchsorted(reached_Q, torch.tensor(QUANTILES, dtype=torch.float64))
    return ((bins + 0.5) / len(counts_Q)).tolist()
