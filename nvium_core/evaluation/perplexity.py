"""Perplexity of π_mix, of each exit alone and of an oracle router; statistics of routing.

One pass predicts every token of a text. All statistics are derived from these predictions. A *target* is a token to
predict. Shapes: T targets, C targets of a chunk, E exits, D width, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from nvium_core.bench.figures import Figures
from nvium_core.errors import NviumError
from nvium_core.model import mixture
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import Nvium

CHUNK_ROWS = 128  # number of targets whose logits are in memory at a time


class EvaluationError(NviumError, ValueError):
    """The model or the text cannot be evaluated."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of all targets, on the CPU. Probabilities are float64 in any model precision.

    document: index of the target's document [T].
    log_p: log p_k [T, E].
    log_remaining: log Π_{j≤k} (1 − w_j) [T, E].
    exit_nll: −log π_k of the target [T, E].
    """

    document: Tensor
    log_p: Tensor
    log_remaining: Tensor
    exit_nll: Tensor

    @property
    def mix_nll(self) -> Tensor:
        """−log π_mix of the target, computed from `log_p` and `exit_nll` [T]."""
        return mixture.mixture_nll(self.log_p, self.exit_nll)


class Window(NamedTuple):
    """Consecutive tokens of a document. The tokens from index `first_target` on are targets."""

    document: int
    token_ids: list[int]
    first_target: int


def predictions(model: Nvium, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Predictions:
    """Predict every token of every document from at least half a context of preceding tokens, or all if fewer."""
    num_targets = sum(len(document_tokens(tokenizer, document)) - 1 for document in documents)
    found, filled = empty_predictions(num_targets, model.config.num_exits), 0
    for window in text_windows(tokenizer, documents, model.config.max_position_embeddings):
        filled = predict_window(model, window, found, filled)
    return found


def empty_predictions(num_targets: int, num_exits: int) -> Predictions:
    """Allocate all results at once. Allocating them one by one, between large temporaries, would fragment the heap."""
    document = torch.empty(num_targets, dtype=torch.long)
    log_p, log_remaining, exit_nll = torch.empty(3, num_targets, num_exits, dtype=torch.float64)
    return Predictions(document, log_p, log_remaining, exit_nll)


def text_windows(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], context: int) -> Iterator[Window]:
    """Yield windows in which every token of every document is a target once. Show the progress on standard error."""
    shown = track(documents, "evaluating", transient=True, console=Console(stderr=True))
    for number, document in enumerate(shown):
        token_ids = document_tokens(tokenizer, document)
        for start, first_target, stop in windows(len(token_ids), context):
            yield Window(number, token_ids[start:stop], first_target - start)


def document_tokens(tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """Tokenize a document, with an end-of-text token before and after it."""
    end = tokenizer.eos_token_id
    if end is None:
        raise EvaluationError("the tokenizer must have an end-of-text token, to separate documents")
    return [end, *tokenizer.encode(document, add_special_tokens=False, verbose=False), end]


def windows(num_tokens: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first target, stop) of overlapping windows. Every token except the first is a target once."""
    first_target = 1
    while first_target < num_tokens:
        start = max(0, first_target - max(1, context // 2)) if first_target > 1 else 0
        stop = min(num_tokens, start + context + 1)
        yield start, first_target, stop
        first_target = stop


@torch.inference_mode()
def predict_window(model: Nvium, window: Window, found: Predictions, start: int) -> int:
    """Predict a window's targets and write the results to `found`, from index `start` on. Return the next index.

    Logits and log w have the model's precision. All other steps use float64 and log space. In float32, π_k over 8,192
    tokens may sum to 1 ± 3e-5, and a probability below e^−103 becomes 0.
    """
    ids_BT = torch.tensor([window.token_ids], device=model.device)
    positions_BT = torch.arange(ids_BT.shape[1] - 1, device=model.device)[None]
    states = model.hidden_states(ids_BT[:, :-1], positions_BT, causal_attention())
    first = window.first_target - 1
    rows = [h_BTD[0, first:].split(CHUNK_ROWS) for h_BTD in states]
    for target_C, *h in zip(ids_BT[0, first + 1 :].split(CHUNK_ROWS), *rows, strict=True):
        place = slice(start, start := start + len(target_C))
        log_w, outputs = model.exit_outputs(list(h))
        nll = [cross_entropy(model.lm_head(o_CD).double(), target_C, reduction="none") for o_CD in outputs]
        found.document[place] = window.document
        found.log_p[place] = mixture.log_exit_probs(log_w.double())
        found.log_remaining[place] = mixture.log_remaining(log_w)
        found.exit_nll[place] = torch.stack(nll, -1)
    return start


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
