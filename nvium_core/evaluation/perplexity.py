"""How well a model predicts a text: π_mix, each exit alone, and a router that knew; where it speaks, how sure it is.

Shapes: T tokens of a window, E exits.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nvium_core.evaluation.positions import Positions, PositionTotals
from nvium_core.evaluation.predictions import Predictions, predictions
from nvium_core.evaluation.reliability import Calibration, CalibrationTotals
from nvium_core.evaluation.routing import Routing, RoutingTotals
from nvium_core.model.nvium import NviumForCausalLM

ROUNDING = 1e-5
"""By how many nats float32 may seem to break the bound, and by how much a sum of probabilities may miss 1."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Routing, Calibration, Positions):
    """Means over all tokens of a text, end-of-text included.

    `perplexity` is π_mix's, `exit_perplexities` those of each exit alone, and `oracle_perplexity` that of a router
    which always chose the exit that says the token best, exp E[min_k ℓ_k] (paper, Proposition 3). `bound_violations`
    counts tokens outside min_k ℓ_k ≤ ℓ_mix ≤ max_k ℓ_k (Proposition 2) and `mass_violations` those where π_mix does not
    add up to 1 (Proposition 1), both by more than rounding; both must be 0.
    """

    num_tokens: int
    num_characters: int
    perplexity: float
    bits_per_character: float
    exit_perplexities: list[float]
    oracle_perplexity: float
    bound_violations: int
    mass_violations: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: NviumForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], show_progress: bool = False
) -> Evaluation:
    """Predict every token of every document once, each with at least half a context before it where there is one."""
    num_exits = model.config.num_exits
    losses, routing, calibration = LossTotals(num_exits), RoutingTotals(num_exits), CalibrationTotals()
    positions = PositionTotals(model.config.max_position_embeddings)
    for each in predictions(model, tokenizer, documents, show_progress):
        for totals in losses, routing, calibration, positions:
            totals.add(each)
    return Evaluation(
        **losses.figures(sum(map(len, documents))),
        **vars(routing.figures(model.config.exit_layers or [])),
        **vars(calibration.figures()),
        **vars(positions.figures()),
    )


class LossTotals:
    """Running totals over windows."""

    def __init__(self, num_exits: int) -> None:
        self.num_tokens = self.bound_violations = self.mass_violations = 0
        self.mix_nll = self.oracle_nll = 0.0
        self.exit_nll_E = torch.zeros(num_exits, dtype=torch.float64)

    def add(self, predictions: Predictions) -> None:
        nll_TE, mix_nll_T = predictions.exit_nll, predictions.mix_nll
        self.num_tokens += len(nll_TE)
        self.mix_nll += float(mix_nll_T.sum())
        self.oracle_nll += float(nll_TE.amin(-1).sum())
        self.exit_nll_E += nll_TE.sum(0)
        said_T = predictions.explicit_nll
        is_bound_T = (nll_TE.amin(-1) <= said_T + ROUNDING) & (said_T <= nll_TE.amax(-1) + ROUNDING)
        self.bound_violations += int((~is_bound_T).sum())
        self.mass_violations += int(((predictions.mass - 1).abs() > ROUNDING).sum())

    def figures(self, num_characters: int) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_characters": num_characters,
            "perplexity": math.exp(self.mix_nll / self.num_tokens),
            "bits_per_character": self.mix_nll / num_characters / math.log(2),
            "exit_perplexities": (self.exit_nll_E / self.num_tokens).exp().tolist(),
            "oracle_perplexity": math.exp(self.oracle_nll / self.num_tokens),
            "bound_violations": self.bound_violations,
            "mass_violations": self.mass_violations,
        }
