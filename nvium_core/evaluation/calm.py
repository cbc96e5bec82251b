"""How well CALM* predicts a text, each token at the exit its row leaves at.

LayerSkip emits at its last exit only, like the dense model, and `perplexity.evaluate` measures both.

Shapes: T tokens, E exits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.evaluation.perplexity import TextLoss, text_loss
from nvium_core.evaluation.predictions import text_windows
from nvium_core.training.baselines.calm import CalmForCausalLM
from nvium_core.training.baselines.confidence import confident_losses
from nvium_core.training.data.windows import packed_batch


@dataclass(frozen=True, kw_only=True)
class CalmEvaluation(TextLoss):
    """CALM* at one threshold. `exit_shares`: shares of rows that left at each exit; `mean_depth`: mean l_k / L."""

    threshold: float
    exit_shares: list[float]
    mean_depth: float


def evaluate_calm(
    model: CalmForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    threshold: float,
    show_progress: bool = False,
) -> CalmEvaluation:
    """Every token of every document once, each with at least half a context before it where available."""
    progress = f"τ = {threshold}" if show_progress else None
    parts = [
        window_losses(model, *window, threshold)
        for window in text_windows(tokenizer, documents, model.config.max_position_embeddings, progress)
    ]
    document_T, nll_T, exit_T = map(torch.cat, zip(*parts, strict=True))
    depths_E = torch.tensor(model.config.exit_layers, dtype=torch.float64)
    shares_E = exit_T.bincount(minlength=len(depths_E)) / len(exit_T)
    return CalmEvaluation(
        **text_loss(nll_T, document_T, documents),
        threshold=threshold,
        exit_shares=shares_E.tolist(),
        mean_depth=float((depths_E / depths_E[-1])[exit_T].mean()),
    )


def window_losses(
    model: CalmForCausalLM, document: int, token_ids: Sequence[int], first_target: int, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the targets token_ids[first_target:]: their document, −log of their probability at their row's exit, and that
    exit, each [T]."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    losses = confident_losses(model, packed_batch(ids_BT[:, :-1], ids_BT[:, 1:], end_token=-1), threshold)
    nll_T, exit_T = (losses.nll[0, first_target - 1 :].double().cpu(), losses.exits[0, first_target - 1 :].cpu())
    return torch.full_like(exit_T, document), nll_T, exit_T
