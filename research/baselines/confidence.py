"""CALM*'s rule: a row leaves at the first exit where its largest probability is above τ.

The layers above the exit compute their keys and values from the row's state at the exit. `generate` applies the rule
token by token. `confident_losses` applies it to all tokens of a known text at once, with the same result.

Shapes: B windows, T tokens, D width, V vocabulary.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.evaluation.perplexity import text_loss
from nvium_core.evaluation.predictions import text_windows
from nvium_core.model.nvium import token_nll
from nvium_core.training.data.windows import Batch, packed_batch
from research.baselines.calm import CalmForCausalLM
from research.baselines.decoding import Decoding, Generated, choose, head_logits


def confidence(logits_XV: Tensor) -> Tensor:
    """Return the largest probability [X]."""
    return logits_XV.softmax(-1).amax(-1)


@torch.inference_mode()
def generate(
    model: CalmForCausalLM,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    threshold: float,
    rng: random.Random | None = None,
) -> Generated:
    """Generate exactly `max_tokens` tokens. They are sampled if `rng` is given, else greedy.

    Except for the last, all rows of the prompt pass all layers. Raise `ValueError` if the tokens do not fit into the
    context.
    """
    started = time.perf_counter()
    decoding, exit_layers = Decoding(model, prompt_ids, max_tokens), list[int]()
    decoding.read_prompt()
    for _ in range(max_tokens):
        logits_V, exit_layer = leave_when_confident(decoding, threshold)
        decoding.token_ids.append(choose(logits_V, rng))
        exit_layers.append(exit_layer)
    return Generated(decoding.token_ids[len(prompt_ids) :], exit_layers, time.perf_counter() - started)


def leave_when_confident(decoding: Decoding, threshold: float) -> tuple[Tensor, int]:
    """Run the front row until an exit is confident. Return the exit's logits [V] and its depth in layers."""
    model, front, depth = decoding.model, decoding.front, decoding.model.config.num_hidden_layers
    h_RD = decoding.embed(decoding.token_ids[-1:])
    for number, layers in enumerate(model.config.blocks):
        h_RD = decoding.run(h_RD, layers, front)
        logits_V = head_logits(model, number, h_RD[-1])
        if layers.stop == depth or float(confidence(logits_V)) > threshold:
            decoding.fill(h_RD, range(layers.stop, depth), front)
            return logits_V, layers.stop
    raise AssertionError("the last exit always emits")


class ConfidentLosses(NamedTuple):
    """For each target [B, T]: −log of its probability at the exit where its row leaves, and this exit (from 0)."""

    nll: Tensor
    exits: Tensor


@torch.inference_mode()
def confident_losses(model: CalmForCausalLM, batch: Batch, threshold: float) -> ConfidentLosses:
    """Compute the losses of a known text with the rule applied to every row.

    A row that has left keeps its state while other rows pass further layers.
    """
    h_BTD = model.model.embed_tokens(batch.inputs)
    rotary, attend = model.model.rotary_emb(batch.positions, h_BTD.dtype), batch.attention()
    exits_BT = torch.full_like(batch.inputs, len(model.exits) - 1)
    nll_BT, inside_BT = torch.zeros_like(h_BTD[..., 0]), torch.ones_like(batch.inputs, dtype=torch.bool)
    for number, layers in enumerate(model.config.blocks):
        for layer in layers:
            h_BTD = torch.where(inside_BT[..., None], model.model.run(h_BTD, [layer], rotary, attend), h_BTD)
        logits_BTV = head_logits(model, number, h_BTD)
        nll_BT = torch.where(inside_BT, token_nll(logits_BTV, batch.targets), nll_BT)
        leaving_BT = inside_BT & (confidence(logits_BTV) > threshold)
        exits_BT = torch.where(leaving_BT, number, exits_BT)
        inside_BT = inside_BT & ~leaving_BT
    return ConfidentLosses(nll_BT, exits_BT)


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The loss of a text, including end-of-text tokens.

    `document_losses` are Σ −ln p over the `document_tokens` of each document. Paired comparisons use them.
    """

    num_tokens: int
    num_characters: int
    perplexity: float
    bits_per_character: float
    document_tokens: list[int]
    document_losses: list[float]


@dataclass(frozen=True, kw_only=True)
class CalmEvaluation(TextLoss):
    """CALM* at one threshold. `exit_shares` is the share of rows per exit, and `mean_depth` the mean l_k / L."""

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
    """Evaluate every token once. It sees at least half a context, or everything before it in the document."""
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
    """Return the document number, −log probability and exit of the targets token_ids[first_target:], each [T]."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    losses = confident_losses(model, packed_batch(ids_BT[:, :-1], ids_BT[:, 1:], end_token=-1), threshold)
    nll_T, exit_T = (losses.nll[0, first_target - 1 :].double().cpu(), losses.exits[0, first_target - 1 :].cpu())
    return torch.full_like(exit_T, document), nll_T, exit_T
