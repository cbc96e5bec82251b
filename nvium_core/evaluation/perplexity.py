"""Perplexity of π_mix, of each exit alone and of an oracle router; statistics of routing.

Shapes: T tokens of a text, E exits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.bench.figures import Figures
from nvium_core.evaluation.predictions import Predictions, predictions
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium


def evaluate(
    model: Nvium,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    thresholds: Sequence[float] = (),
) -> Figures:
    """Predict every token of every document once. Return means over all tokens, including end-of-text tokens.

    ℓ_k is −ln π_k of a token, ℓ_mix is −ln π_mix.

    document_tokens, document_losses: number of tokens, and Σ ℓ_mix, of each document. Paired comparisons use them.
    perplexity, exit_perplexities: perplexity of π_mix, and of each exit alone.
    oracle_perplexity: perplexity if each token used its best exit, exp E[min_k ℓ_k] (paper, Proposition 3).
    exit_shares: mean p_k.
    exit_posteriors: mean of p_k π_k / π_mix, the probability that exit k emitted the token. If the loss is L_mix alone,
        training makes shares and posteriors equal. β moves shares to shallower exits.
    mean_depth: mean of Σ_k p_k l_k / L.
    routing_entropy: mean entropy of p in nats, at most ln N.
    thresholds: the same text with `sampling: threshold`, for each requested threshold.
    """
    found, exit_layers = predictions(model, tokenizer, documents), model.config.exit_layers or []
    return {
        **text_loss(found.mix_nll, found.document, documents),
        "exit_perplexities": found.exit_nll.mean(0).exp().tolist(),
        "oracle_perplexity": float(found.exit_nll.amin(-1).mean().exp()),
        **routing(found, exit_layers),
        "thresholds": [at_threshold(found, each, exit_layers) for each in thresholds],
    }


def at_threshold(found: Predictions, threshold: float, exit_layers: Sequence[int]) -> Figures:
    """Return the perplexity of the exits that a threshold chooses, and their `depth_figures`."""
    exit_T = mixture.threshold_exit(found.log_remaining, threshold if threshold < 1 else math.inf)
    perplexity = float(found.exit_nll.gather(-1, exit_T[:, None]).mean().exp())
    return {"threshold": threshold, "perplexity": perplexity, **depth_figures(exit_T, exit_layers)}


def depth_figures(exit_T: Tensor, exit_layers: Sequence[int]) -> Figures:
    """Return the mean depth l_k / L and the shares of the exits k (from 0) that a rule has chosen."""
    depths_E = torch.tensor(exit_layers, dtype=torch.float64) / exit_layers[-1]
    shares_E = exit_T.bincount(minlength=len(depths_E)) / len(exit_T)
    return {"mean_depth": float(depths_E[exit_T].mean()), "exit_shares": shares_E.tolist()}


def text_loss(nll_T: Tensor, document_T: Tensor, documents: Sequence[str]) -> Figures:
    num_characters, total = sum(map(len, documents)), float(nll_T.sum())
    tokens_D = document_T.bincount(minlength=len(documents))
    losses_D = document_T.bincount(nll_T.double(), minlength=len(documents))
    return {
        "num_tokens": len(nll_T),
        "num_characters": num_characters,
        "perplexity": math.exp(total / len(nll_T)),
        "bits_per_character": total / max(1, num_characters) / math.log(2),
        "document_tokens": tokens_D.tolist(),
        "document_losses": [round(loss, 4) for loss in losses_D.tolist()],
    }


def routing(found: Predictions, exit_layers: Sequence[int]) -> Figures:
    p_TE = found.log_p.exp()
    posterior_TE = (found.log_p - found.exit_nll + found.mix_nll[:, None]).exp()
    return {
        "exit_shares": p_TE.mean(0).tolist(),
        "exit_posteriors": posterior_TE.mean(0).tolist(),
        "mean_depth": float(mixture.mean_depth(found.log_p, exit_layers).mean()),
        "routing_entropy": float(-torch.special.xlogy(p_TE, p_TE).sum(-1).mean()),
    }
