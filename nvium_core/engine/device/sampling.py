"""Drawing tokens: temperature and truncation, the inverse CDF, and the certified argmax of the mixture. The reference
for native/draw.h.

All in float64 and in token-id order, ties to the lowest id, so that a draw is a function of its distribution and its
uniform. Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_core.engine.params import Draw
from nvium_core.engine.schedule.step import NO_TOKEN

MANY_CANDIDATES = 1024
"""Tokens among which those of top-p are looked for first, where there is no top-k."""

MIN_SHARE = 4
"""The candidates are at most a vocabulary's part of this, or else all of it is sorted."""

NOT_DRAWN = NO_TOKEN - 1
"""In place of a token whose row keeps more than the candidates."""

CERTAINTY_MARGIN = 1e-9
"""ε of the certificate: more than float64 rounding can move a sum of probabilities."""


@dataclass(frozen=True)
class Truncation:
    """Per row: temperature > 0, log min-p (-inf is off), top-k (0 is off) and top-p (1 is off).

    `is_ranked`: some row has top-k or top-p. `num_candidates`: so many of the most probable tokens are ranked, and the
    whole vocabulary only if some row keeps more; 0 ranks all of it at once.
    """

    temperature_R: Tensor
    log_min_p_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    is_ranked: bool
    num_candidates: int = 0

    @classmethod
    def of(cls, draws: Items[Draw], device: torch.device) -> "Truncation":
        counts = [draw.top_k or MANY_CANDIDATES for draw in draws if draw.is_ranked]
        return cls(
            torch.tensor([draw.temperature for draw in draws], dtype=torch.float64, device=device),
            torch.tensor([draw.log_min_p for draw in draws], dtype=torch.float64, device=device),
            torch.tensor([draw.top_k for draw in draws], device=device),
            torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=device),
            is_ranked=bool(counts),
            num_candidates=max(counts, default=0),
        )

    def ranks_candidates(self, vocab_size: int) -> bool:
        return 0 < MIN_SHARE * self.num_candidates <= vocab_size


def draw_tokens(logits_RV: Tensor, draws: Items[Draw], uniforms: Items[float]) -> list[int]:
    """One token per row, from f of its logits; `NO_TOKEN` where they are no distribution. Either all draws are of the
    original, or none is."""
    if draws[0].is_original:
        return draw_by_race(logits_RV, draws, uniforms)
    uniform_R = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)
    tokens: list[int] = draw(logits_RV, Truncation.of(draws, logits_RV.device), uniform_R).tolist()
    return tokens


def draw(logits_RV: Tensor, truncation: Truncation, uniform_R: Tensor) -> Tensor:
    """One token per row, [R], from softmax(logits) after temperature, min-p, top-k, and top-p of what is left."""
    probs_RV = below_peak(logits_RV, truncation).softmax(-1)
    return inverse_cdf(truncate(probs_RV, truncation) if truncation.is_ranked else probs_RV, uniform_R)


def draw_unread(logits_RV: Tensor, truncation: Truncation, uniform_R: Tensor) -> Tensor:
    """As `draw`, but no value is read on the host: `NOT_DRAWN` where the candidates are not enough."""
    probs_RV = below_peak(logits_RV, truncation).softmax(-1)
    if not truncation.is_ranked:
        return inverse_cdf(probs_RV, uniform_R)
    if not truncation.ranks_candidates(probs_RV.shape[-1]):
        return inverse_cdf(truncate_all(probs_RV, truncation), uniform_R)
    kept_RV, is_enough_R = truncate_candidates(probs_RV, truncation)
    return inverse_cdf(kept_RV, uniform_R).where(is_enough_R, NOT_DRAWN)


def draw_by_race(logits_RV: Tensor, draws: Items[Draw], uniforms: Items[float]) -> list[int]:
    """One token per row, the first in a race: token v comes in after E_v / weight, where E_v is an exponential number
    that the uniform and v determine. So it is drawn from the weights, and two distributions that are alike mostly draw
    the same token from the same uniform. At temperature 0, the first of the most probable.
    """
    is_greedy_R = torch.tensor([draw.temperature == 0 for draw in draws], device=logits_RV.device)
    warm = [draw._replace(temperature=draw.temperature or 1.0) for draw in draws]
    truncation = Truncation.of(warm, logits_RV.device)
    weight_RV = below_peak(logits_RV, truncation).exp()
    if truncation.is_ranked:
        weight_RV = truncate(weight_RV, truncation)
    time_RV = race_numbers(uniforms, logits_RV.shape[-1], logits_RV.device) / weight_RV
    token_R = torch.where(is_greedy_R, logits_RV.argmax(-1), time_RV.argmin(-1))
    tokens: list[int] = torch.where(torch.isfinite(weight_RV.sum(-1)), token_R, NO_TOKEN).tolist()
    return tokens


def race_numbers(uniforms: Items[float], vocab_size: int, device: torch.device) -> Tensor:
    """Exponential numbers [R, V] of mean 1: −log of numbers in (0, 1) by SplitMix64 (Steele et al. 2014), which begins
    with the uniform's 53 bits and counts tokens."""
    key_R = torch.tensor([int(uniform * 2**53) for uniform in uniforms], device=device)
    x_RV = key_R[:, None] + torch.arange(1, vocab_size + 1, device=device) * GOLDEN
    for shift, factor in MIXING:
        x_RV = (x_RV ^ shifted(x_RV, shift)) * factor
    return -((shifted(x_RV ^ shifted(x_RV, 31), 12).double() + 0.5) * 2.0**-52).log()


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def shifted(x: Tensor, by: int) -> Tensor:
    """To the right, as if it had no sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def below_peak(logits_RV: Tensor, truncation: Truncation) -> Tensor:
    """After temperature, less the highest; -inf where min-p cuts."""
    precise_RV = logits_RV.double()
    below_RV = (precise_RV - precise_RV.amax(-1, keepdim=True)) / truncation.temperature_R[:, None]
    return below_RV.masked_fill(below_RV < truncation.log_min_p_R[:, None], -torch.inf)


def truncate(probs_RV: Tensor, truncation: Truncation) -> Tensor:
    """Zero all but the k most probable tokens, then all but the fewest of those that hold top-p of their mass."""
    if truncation.ranks_candidates(probs_RV.shape[-1]):
        kept_RV, is_enough_R = truncate_candidates(probs_RV, truncation)
        if all(is_enough_R.tolist()):
            return kept_RV
    return truncate_all(probs_RV, truncation)


def truncate_all(probs_RV: Tensor, truncation: Truncation) -> Tensor:
    """By sorting the vocabulary: the reference for `truncate_candidates`."""
    vocab_size = probs_RV.shape[-1]
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    k_R1 = torch.where(truncation.top_k_R > 0, truncation.top_k_R, vocab_size)[:, None]
    sorted_RV = sorted_RV.masked_fill(torch.arange(vocab_size, device=k_R1.device) >= k_R1, 0)
    nothing_RV = torch.zeros_like(probs_RV)
    total_R1 = nothing_RV.scatter(-1, order_RV, sorted_RV).sum(-1, keepdim=True)
    cut_RV = beyond_top_p(sorted_RV, total_R1, truncation)
    return nothing_RV.scatter(-1, order_RV, sorted_RV.masked_fill(cut_RV, 0))


def truncate_candidates(probs_RV: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """The same by sorting candidates, in token-id order where they are equal, and of which rows all that is kept was
    among them, [R]. Shapes: C candidates."""
    top_k_R1, top_p_R1, count = truncation.top_k_R[:, None], truncation.top_p_R[:, None], truncation.num_candidates
    first_RV = most_probable(probs_RV, torch.where(top_k_R1 > 0, top_k_R1, count), count)
    token_RC = first_RV.topk(count).indices.sort(-1).values
    sorted_RC, order_RC = first_RV.gather(-1, token_RC).sort(dim=-1, descending=True, stable=True)
    total_R1 = torch.where(top_k_R1 > 0, first_RV, probs_RV).sum(-1, keepdim=True)
    cut_RC = beyond_top_p(sorted_RC, total_R1, truncation)
    kept_RC = sorted_RC.masked_fill(cut_RC, 0)
    kept_RV = torch.zeros_like(probs_RV).scatter(-1, token_RC.gather(-1, order_RC), kept_RC)
    is_whole_R1 = ((top_k_R1 == 0) & (top_p_R1 == 1)) | ~torch.isfinite(probs_RV.sum(-1, keepdim=True))
    is_enough_R1 = is_whole_R1 | torch.where(top_k_R1 > 0, top_k_R1 <= count, cut_RC[:, -1:])
    return torch.where(is_whole_R1, probs_RV, kept_RV), is_enough_R1[:, 0]


def most_probable(probs_RV: Tensor, k_R1: Tensor, most: int) -> Tensor:
    """All but k probabilities of each row are zero, or all but `most` or more where k exceeds that; of equal ones the
    lowest token ids count."""
    least_R1 = probs_RV.topk(most).values.gather(-1, k_R1.clamp(max=most) - 1)
    is_above_RV, is_least_RV = probs_RV > least_R1, probs_RV == least_R1
    room_R1 = k_R1 - is_above_RV.sum(-1, keepdim=True)
    return probs_RV.where(is_above_RV | (is_least_RV & (is_least_RV.cumsum(-1) <= room_R1)), 0)


def beyond_top_p(sorted_RX: Tensor, total_R1: Tensor, truncation: Truncation) -> Tensor:
    """Where those before hold top-p of the mass; never the first, as top-p of the mass may underflow to nothing."""
    top_p_R1 = truncation.top_p_R[:, None]
    cut_RX = (cumulative(sorted_RX) - sorted_RX >= top_p_R1 * total_R1) & (top_p_R1 < 1)
    cut_RX[:, 0] = False
    return cut_RX


def inverse_cdf(probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds uniform · total, [R]; `NO_TOKEN` where there is none."""
    cdf_RV = cumulative(probs_RV)
    total_R1 = cdf_RV[:, -1:]
    token_R = torch.searchsorted(cdf_RV, uniform_R[:, None] * total_R1, right=True)[:, 0]
    return torch.where(torch.isfinite(total_R1[:, 0]), token_R, NO_TOKEN)


def cumulative(probs_RV: Tensor) -> Tensor:
    """Cumulative sums of rows. On CUDA that of a single row is shared among processors in an order that varies from run
    to run, that of one of several is not."""
    if probs_RV.device.type != "cpu" and len(probs_RV) == 1:
        return probs_RV.expand(2, -1).cumsum(-1)[:1]
    return probs_RV.cumsum(-1)


def certified_argmax(partial_mixture_RV: Tensor, remaining_R: Tensor) -> tuple[Tensor, Tensor]:
    """The argmax of the partial mixture m_k, [R], and whether no later exit can change it, [R].

    It cannot once top1(m_k) − top2(m_k) exceeds the mass r_k that is still to come.
    """
    top_R2 = partial_mixture_RV.topk(2, dim=-1).values
    certain_R = top_R2[:, 0] - top_R2[:, 1] > remaining_R + CERTAINTY_MARGIN
    token_R = partial_mixture_RV.argmax(-1)
    return torch.where(torch.isfinite(top_R2[:, 0]), token_R, NO_TOKEN), certain_R
