"""How well a model predicts a text: π_mix and each exit alone, and how deep it goes to do so.

Shapes: T tokens of a window, E exits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.model import mixture
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.data import packed_batch
from nvium_core.training.loss import token_losses


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over all tokens of a text, end-of-text included.

    `perplexity` is π_mix's, `exit_perplexities` those of each exit alone. `exit_shares` are the mean p_k, and
    `mean_depth` is Σ p_k l_k / L.
    """

    num_tokens: int
    num_characters: int
    perplexity: float
    bits_per_character: float
    exit_perplexities: list[float]
    exit_shares: list[float]
    mean_depth: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: NviumForCausalLM, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], show_progress: bool = False
) -> Evaluation:
    """Predict every token of every document once, each with at least half a context before it where there is one."""
    context = model.config.max_position_embeddings
    sums = Sums(model.config.num_exits)
    for document in track(documents, "evaluating", disable=not show_progress):
        token_ids = [
            tokenizer.eos_token_id,
            *tokenizer.encode(document, add_special_tokens=False, verbose=False),
            tokenizer.eos_token_id,
        ]
        for start, first_target, stop in windows(len(token_ids), context):
            sums.add(*window_losses(model, token_ids[start:stop], first_target - start))
    return sums.evaluation(sum(map(len, documents)), model.config.exit_layers or [])


def windows(num_tokens: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(start, first target, stop) of overlapping windows that make every token but the first a target exactly once."""
    first_target = 1
    while first_target < num_tokens:
        start = max(0, first_target - max(1, context // 2)) if first_target > 1 else 0
        stop = min(num_tokens, start + context + 1)
        yield start, first_target, stop
        first_target = stop


@torch.inference_mode()
def window_losses(model: NviumForCausalLM, token_ids: Sequence[int], first_target: int) -> tuple[Tensor, Tensor]:
    """log p [T, E] and −log π_k [T, E] of the targets token_ids[first_target:]."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    losses = token_losses(model, packed_batch(ids_BT[:, :-1], ids_BT[:, 1:], end_token=-1))
    return losses.log_p[0, first_target - 1 :].double(), losses.exit_nll[0, first_target - 1 :].double()


class Sums:
    """Running totals over windows."""

    def __init__(self, num_exits: int) -> None:
        self.num_tokens = 0
        self.mix_nll = 0.0
        self.exit_nll_E = torch.zeros(num_exits, dtype=torch.float64)
        self.exit_probs_E = torch.zeros(num_exits, dtype=torch.float64)

    def add(self, log_p_TE: Tensor, nll_TE: Tensor) -> None:
        self.num_tokens += len(nll_TE)
        self.mix_nll += float(mixture.mixture_nll(log_p_TE, nll_TE).sum())
        self.exit_nll_E += nll_TE.sum(0).cpu()
        self.exit_probs_E += log_p_TE.exp().sum(0).cpu()

    def evaluation(self, num_characters: int, exit_layers: Sequence[int]) -> Evaluation:
        shares = (self.exit_probs_E / self.num_tokens).tolist()
        return Evaluation(
            num_tokens=self.num_tokens,
            num_characters=num_characters,
            perplexity=math.exp(self.mix_nll / self.num_tokens),
            bits_per_character=self.mix_nll / num_characters / math.log(2),
            exit_perplexities=(self.exit_nll_E / self.num_tokens).exp().tolist(),
            exit_shares=shares,
            mean_depth=sum(p * depth / exit_layers[-1] for p, depth in zip(shares, exit_layers, strict=True)),
        )
