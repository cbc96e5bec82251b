"""How well CALM* predicts a text, each token at the exit its row leaves at.

LayerSkip speaks for its last exit alone, as the dense model does, and `perplexity.evaluate` measures both of these.
Shapes: T tokens of a window, E exits.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.evaluation.predictions import document_windows
from nvium_core.training.baselines.calm import CalmForCausalLM
from nvium_core.training.baselines.confidence import confident_losses
from nvium_core.training.data.windows import packed_batch


@dataclass(frozen=True, kw_only=True)
class CalmEvaluation:
    """CALM* at one threshold, means over all tokens of a text, end-of-text included.

    `exit_shares` are the shares of rows that left at each exit, and `mean_depth` is the mean l_k / L of where.
    """

    threshold: float
    num_tokens: int
    num_characters: int
    perplexity: float
    bits_per_character: float
    exit_shares: list[float]
    mean_depth: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_calm(
    model: CalmForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    threshold: float,
    show_progress: bool = False,
) -> CalmEvaluation:
    """Predict every token of every document once, each with at least half a context before it where there is one."""
    total_nll, exit_counts_E = 0.0, torch.zeros(model.config.num_exits, dtype=torch.long)
    seen = track(documents, f"τ = {threshold}", disable=not show_progress)
    for token_ids, first_target in document_windows(tokenizer, seen, model.config.max_position_embeddings):
        nll_T, exits_T = window_losses(model, token_ids, first_target, threshold)
        total_nll += float(nll_T.sum())
        exit_counts_E += exits_T.bincount(minlength=len(exit_counts_E)).cpu()
    return as_means(model, threshold, total_nll, exit_counts_E, sum(map(len, documents)))


def window_losses(
    model: CalmForCausalLM, token_ids: Sequence[int], first_target: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """−log of the probability [T] of the targets token_ids[first_target:] where their rows left, and that exit [T]."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    losses = confident_losses(model, packed_batch(ids_BT[:, :-1], ids_BT[:, 1:], end_token=-1), threshold)
    return losses.nll[0, first_target - 1 :].double(), losses.exits[0, first_target - 1 :]


def as_means(
    model: CalmForCausalLM, threshold: float, total_nll: float, exit_counts_E: Tensor, num_characters: int
) -> CalmEvaluation:
    """The sums as means."""
    num_tokens, exit_layers = int(exit_counts_E.sum()), model.config.exit_layers or []
    shares = (exit_counts_E / num_tokens).tolist()
    return CalmEvaluation(
        threshold=threshold,
        num_tokens=num_tokens,
        num_characters=num_characters,
        perplexity=math.exp(total_nll / num_tokens),
        bits_per_character=total_nll / num_characters / math.log(2),
        exit_shares=shares,
        mean_depth=sum(share * depth / exit_layers[-1] for share, depth in zip(shares, exit_layers, strict=True)),
    )
