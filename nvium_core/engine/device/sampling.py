"""Sampling from logits by the inverse CDF or by an exponential race, and the certified argmax of a mixture.

The reference for native/draw.h. Weights have the logits' precision, at least float32. They are summed in float64, in
order of token ids. Among equal weights the lowest id wins. CUDA graphs can capture sampling: the host reads no value.

Shapes: R rows, V vocabulary, X weights, C chunks of CHUNK weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvium_core.engine.schedule.step import NO_TOKEN

CHUNK = 256
"""Weights per partial sum. Sums of chunks avoid a cumulative sum over the whole vocabulary."""

CERTAINTY_MARGIN = 1e-9
"""Margin of the certificate, larger than the float64 rounding error of a sum of probabilities."""


Columns = Mapping[str, Tensor]
"""The fields of `Draw` by name, [R] each."""


def draw(logits_RV: Tensor, draws: Columns, uniform_R: Tensor, *, is_ranked: bool) -> Tensor:
    """Sample tokens, [R], after temperature, min-p, top-k and top-p. At temperature 0 take the argmax.

    Rows with NaN or infinities get `NO_TOKEN`. `is_ranked`: whether any row has top-k or top-p.
    """
    weight_RV = weights(logits_RV, draws, is_ranked=is_ranked)
    total_R1 = chunk_sums(weight_RV).sum(-1, keepdim=True)
    token_R = first_beyond(weight_RV, uniform_R[:, None] * total_R1)[:, 0]
    token_R = torch.where(draws["temperature"] == 0, logits_RV.argmax(-1), token_R)
    return torch.where(total_R1[:, 0].isfinite(), token_R, NO_TOKEN)


def race(logits_RV: Tensor, draws: Columns, uniform_R: Tensor, *, is_ranked: bool) -> Tensor:
    """Sample one token per row by an exponential race: the token v with the smallest E_v / weight_v wins.

    E_v is an exponential variate that depends only on the uniform and on v. A token wins with a probability in
    proportion to its weight. For the same uniform, similar distributions mostly give the same token. At temperature 0
    the winner is the argmax.
    """
    weight_RV = weights(logits_RV, draws, is_ranked=is_ranked)
    time_RV = race_numbers(uniform_R, logits_RV.shape[-1]) / weight_RV
    token_R = torch.where(draws["temperature"] == 0, logits_RV.argmax(-1), time_RV.argmin(-1))
    return torch.where(weight_RV.sum(-1).isfinite(), token_R, NO_TOKEN)


def race_numbers(uniform_R: Tensor, vocab_size: int) -> Tensor:
    """Return exponential variates, [R, V]: −log of a hash of uniform and token (SplitMix64, Steele et al. 2014)."""
    key_R = (uniform_R * 2**53).long() * UNGOLDEN
    x_RV = (key_R[:, None] + torch.arange(1, vocab_size + 1, device=key_R.device)) * GOLDEN
    for shift, factor in MIXING:
        x_RV = (x_RV ^ shift_right(x_RV, shift)) * factor
    return -((shift_right(x_RV ^ shift_right(x_RV, 31), 12).double() + 0.5) * 2.0**-52).log()


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
UNGOLDEN = pow(GOLDEN, -1, 2**64) - 2**64
"""Its inverse. PyTorch's compiler would take a product of GOLDEN and token ids for an index, which overflows."""

MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def shift_right(x: Tensor, by: int) -> Tensor:
    """Shift right without sign extension."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def weights(logits_RV: Tensor, draws: Columns, *, is_ranked: bool) -> Tensor:
    """Return e^((x − max) / temperature), or 0 for truncated tokens. Rows with NaN or infinities become NaN."""
    x_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    temperature_R = draws["temperature"].where(draws["temperature"] > 0, 1.0)
    below_RV = (x_RV - x_RV.amax(-1, keepdim=True)) / temperature_R.to(x_RV.dtype)[:, None]
    weight_RV = below_RV.masked_fill(below_RV < draws["log_min_p"].to(x_RV.dtype)[:, None], -torch.inf).exp()
    return truncate(weight_RV, draws) if is_ranked else weight_RV


def truncate(weight_RV: Tensor, draws: Columns) -> Tensor:
    """Zero weights outside the top k, then weights outside the smallest set that has top-p of the remaining mass."""
    top_k_R1, top_p_R1 = draws["top_k"][:, None], draws["top_p"][:, None]
    token_V = torch.arange(weight_RV.shape[-1], device=weight_RV.device)
    sorted_RV, order_RV = weight_RV.sort(dim=-1, descending=True, stable=True)
    last_R1 = torch.where(top_k_R1 > 0, top_k_R1.clamp(max=len(token_V)), len(token_V)) - 1
    of_k_RV = sorted_RV.masked_fill(token_V > last_R1, 0)
    mass_R1 = top_p_R1 * chunk_sums(of_k_RV).sum(-1, keepdim=True)
    enough_R1 = first_beyond(of_k_RV, just_below(mass_R1))
    last_R1 = torch.where(top_p_R1 < 1, torch.minimum(last_R1, enough_R1), last_R1)
    least_R1, least_token_R1 = sorted_RV.gather(-1, last_R1), order_RV.gather(-1, last_R1)
    is_kept_RV = (weight_RV > least_R1) | ((weight_RV == least_R1) & (token_V <= least_token_R1))
    return weight_RV.where(is_kept_RV | weight_RV.isnan(), 0)


def first_beyond(weight_RX: Tensor, target_R1: Tensor) -> Tensor:
    """Return [R, 1]: the first index whose cumulative weight exceeds the target, else the last with a weight."""
    chunks_RCX = in_chunks(weight_RX)
    ends_RC = chunk_sums(weight_RX).cumsum(-1)
    chunk_R1 = first_above(ends_RC, target_R1)
    own_RX = chunks_RCX.gather(1, chunk_R1[:, :, None].expand(-1, -1, CHUNK))[:, 0]
    before_R1 = pad(ends_RC, (1, 0)).gather(-1, chunk_R1)
    place_R1 = first_above(before_R1 + own_RX.cumsum(-1, dtype=torch.float64), target_R1)
    return (chunk_R1 * CHUNK + place_R1).clamp(max=weight_RX.shape[-1] - 1)


def first_above(sums_RX: Tensor, target_R1: Tensor) -> Tensor:
    """Return the index of the first sum above the target, else of the last sum above its predecessor, [R, 1]."""
    reached_R1 = torch.minimum(target_R1, just_below(sums_RX[:, -1:]))
    return torch.searchsorted(sums_RX, reached_R1, right=True).clamp(max=sums_RX.shape[-1] - 1)


def just_below(x: Tensor) -> Tensor:
    return x.nextafter(torch.zeros_like(x))


def in_chunks(weight_RX: Tensor) -> Tensor:
    return pad(weight_RX, (0, -weight_RX.shape[-1] % CHUNK)).unflatten(-1, (-1, CHUNK))


def chunk_sums(weight_RX: Tensor) -> Tensor:
    """Sum each chunk of weights in float64, [R, C]."""
    return in_chunks(weight_RX).sum(-1, dtype=torch.float64)


def certified_argmax(partial_mixture_RV: Tensor, remaining_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax of the partial mixture m_k, [R], and whether no later exit can change it, [R].

    The argmax is final if the two largest elements of m_k differ by more than the probability of all later exits.
    """
    top_R2 = partial_mixture_RV.topk(2, dim=-1).values
    certain_R = top_R2[:, 0] - top_R2[:, 1] > remaining_R + CERTAINTY_MARGIN
    token_R = partial_mixture_RV.argmax(-1)
    return torch.where(torch.isfinite(top_R2[:, 0]), token_R, NO_TOKEN), certain_R
