"""CALM*'s rule on a known text: a token leaves at the first exit where its largest probability is above τ.

As in the engine, leaving early does not change keys and values. So one pass through all exits serves all thresholds.

Shapes: T targets, E exits, D width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.bench.figures import Figures
from nvium_core.evaluation.perplexity import Window, depth_figures, text_loss, text_windows
from nvium_core.model.llama import causal_attention
from research.baselines.calm import CalmForCausalLM


def evaluate_calm(
    model: CalmForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    thresholds: Sequence[float],
) -> list[Figures]:
    """Predict every token of every document once, see `text_windows`. Return loss and depth at each threshold."""
    windows = text_windows(tokenizer, documents, model.config.max_position_embeddings)
    parts = [predict_exits(model, window) for window in windows]
    document_T, nll_TE, confidence_TE = map(torch.cat, zip(*parts, strict=True))
    figures = []
    for threshold in thresholds:
        exit_T = confident_exit(confidence_TE, threshold)
        loss = text_loss(nll_TE.gather(-1, exit_T[:, None])[:, 0], document_T, documents)
        figures.append({"threshold": threshold, **loss, **depth_figures(exit_T, model.config.exit_layers or [])})
    return figures


@torch.inference_mode()
def predict_exits(model: CalmForCausalLM, window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """Return the document of each target, [T], and each exit's −log π_k of it and max π_k, [T, E], in float64."""
    ids_BT = torch.tensor([window.token_ids], device=model.device)
    positions_BT = torch.arange(ids_BT.shape[1] - 1, device=model.device)[None]
    _, outputs = model.exit_outputs(model.hidden_states(ids_BT[:, :-1], positions_BT, causal_attention()))
    target_T, nll, confidence = ids_BT[0, window.first_target :], list[Tensor](), list[Tensor]()
    for o_BTD in outputs:
        log_probs_TV = model.lm_head(o_BTD[0, window.first_target - 1 :]).double().log_softmax(-1)
        nll.append(-log_probs_TV.gather(-1, target_T[:, None])[:, 0])
        confidence.append(log_probs_TV.amax(-1).exp())
    document_T = torch.full_like(target_T, window.document)
    return document_T.cpu(), torch.stack(nll, -1).cpu(), torch.stack(confidence, -1).cpu()


def confident_exit(confidence_TE: Tensor, threshold: float) -> Tensor:
    """Return the first exit (from 0) whose largest probability is above the threshold, else the last, [T]."""
    is_confident_TE = confidence_TE > threshold
    is_confident_TE[:, -1] = True
    return is_confident_TE.int().argmax(-1)
