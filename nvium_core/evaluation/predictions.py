"""A model's predictions of every token of a text: the one pass that all figures come from.

Shapes: T targets of a window, C of them at a time, E exits, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.errors import NviumError
from nvium_core.model import mixture
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM

CHUNK_ROWS = 128
"""Targets whose full distributions are held at once."""


class EvaluationError(NviumError, ValueError):
    """Something that cannot be evaluated; the message names it."""


@dataclass(frozen=True)
class Predictions:
    """For the targets of a window, or of a whole text, on the CPU, computed in float64 from the logits and routers of a
    model of any precision.

    document: number of the target's document [T]. position: in the window, from 0, of the token before the target [T].
    log_w: each exit's log-probabilities of continuing and of exiting [T, E, 2]. log_p: log p_k [T, E]. exit_nll: −log
    π_k of the target [T, E]. explicit_nll: −log π_mix of the target, from π_mix over the whole vocabulary [T]. mass:
    Σ_v π_mix(v), which should be 1 [T]. top_prob: the largest of π_mix [T]. top_is_target: whether that token came [T].
    """

    document: Tensor
    position: Tensor
    log_w: Tensor
    log_p: Tensor
    exit_nll: Tensor
    explicit_nll: Tensor
    mass: Tensor
    top_prob: Tensor
    top_is_target: Tensor

    @property
    def mix_nll(self) -> Tensor:
        """−log π_mix of the target, [T]."""
        return mixture.mixture_nll(self.log_p, self.exit_nll)


class Window(NamedTuple):
    """Tokens of a document, by its number; those from `first_target` on are targets."""

    document: int
    token_ids: list[int]
    first_target: int


def predictions(
    model: NviumForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], show_progress: bool = False
) -> Predictions:
    """Every token of every document, each with at least half a context before it where available."""
    context = model.config.max_position_embeddings
    return joined(
        [
            window_predictions(model, token_ids, first_target, document)
            for document, token_ids, first_target in text_windows(
                tokenizer, documents, context, "evaluating" if show_progress else None
            )
        ]
    )


def text_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], context: int, progress: str | None = None
) -> Iterator[Window]:
    """The windows of a text, with every token of every document a target once; `progress` names a bar."""
    for number, document in enumerate(track(documents, progress or "", disable=progress is None)):
        token_ids = document_tokens(tokenizer, document)
        for start, first_target, stop in windows(len(token_ids), context):
            yield Window(number, token_ids[start:stop], first_target - start)


def document_tokens(tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """A document between two end-of-text tokens."""
    end = tokenizer.eos_token_id
    if end is None:
        raise EvaluationError("the model's tokenizer has no end-of-text token to put around documents")
    return [end, *tokenizer.encode(document, add_special_tokens=False, verbose=False), end]


def windows(num_tokens: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(start, first target, stop) of overlapping windows in which every token but the first is a target exactly
    once."""
    first_target = 1
    while first_target < num_tokens:
        start = max(0, first_target - max(1, context // 2)) if first_target > 1 else 0
        stop = min(num_tokens, start + context + 1)
        yield start, first_target, stop
        first_target = stop


@torch.inference_mode()
def window_predictions(
    model: NviumForCausalLM, token_ids: Sequence[int], first_target: int, document: int = 0
) -> Predictions:
    """Of the targets token_ids[first_target:]."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    positions_BT = torch.arange(ids_BT.shape[1] - 1, device=model.device)[None]
    states = model.hidden_states(ids_BT[:, :-1], positions_BT, causal_attention())
    position_T = positions_BT[0, first_target - 1 :].cpu()
    rows = [h_BTD[0, first_target - 1 :].split(CHUNK_ROWS) for h_BTD in states]
    chunks = zip(position_T.split(CHUNK_ROWS), ids_BT[0, first_target:].split(CHUNK_ROWS), *rows, strict=True)
    return joined([predict(model, list(h), position, target, document) for position, target, *h in chunks])


def joined(parts: Sequence[Predictions]) -> Predictions:
    """Concatenated."""
    return Predictions(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Predictions)))


def predict(
    model: NviumForCausalLM, states: list[Tensor], position_C: Tensor, target_C: Tensor, document: int
) -> Predictions:
    """From the rows' hidden states at the exits, E times [C, D].

    Logits and log w are the model's; all that follows is float64, in log space. In float32, PyTorch's log_softmax on a
    CPU adds V / 16 terms one after the other in each lane of a vector. Beside a token that is nearly certain each is
    rounded by up to 6e-8, mostly the same way, so π_k of 8,192 tokens may add up to 1 ± 3e-5; and beyond 103 nats
    π_mix is 0.
    """
    log_w, outputs = model.exit_outputs(states)
    log_w_CE2 = log_w.double()
    log_p_CE = mixture.log_exit_probs(log_w_CE2)
    nll, log_mixture_CV = [], log_p_CE.new_full((len(target_C), model.config.vocab_size), -torch.inf)
    for o_CD, log_p_C in zip(outputs, log_p_CE.unbind(-1), strict=True):
        log_probs_CV = model.lm_head(o_CD).double().log_softmax(-1)
        nll.append(-log_probs_CV.gather(-1, target_C[:, None])[:, 0])
        log_mixture_CV = log_mixture_CV.logaddexp(log_p_C[:, None] + log_probs_CV)
    top_C, explicit_nll_C = log_mixture_CV.max(-1), -log_mixture_CV.gather(-1, target_C[:, None])[:, 0]
    mixed = (explicit_nll_C, log_mixture_CV.exp().sum(-1), top_C.values.exp(), top_C.indices == target_C)
    found = (log_w_CE2, log_p_CE, torch.stack(nll, -1), *mixed)
    return Predictions(torch.full_like(position_C, document), position_C, *(x.double().cpu() for x in found))
