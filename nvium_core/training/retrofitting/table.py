"""Measure a retrofit on held-out text: each exit alone, the mixture, and the mixture's perplexity increase.

Shapes: R rows, E exits, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.training.data.windows import Windows
from nvium_core.training.retrofitting.distillation import CHUNK_ROWS
from nvium_core.training.retrofitting.model import TeacherRows, WithExits, log_exit_probs

MIN_TEXTS = 3  # fewer texts have no standard error


@dataclass(frozen=True)
class ExitFigures:
    """An exit's measures. `kl` is the KL from the base. `share` is the share of tokens that leave at this exit."""

    layer: int
    perplexity: float
    kl: float
    share: float


@dataclass(frozen=True)
class Measured:
    """A retrofit's measures.

    `price` is the mixture's perplexity divided by the base's, minus 1. `price_error` is the standard error of `price`
    over paired tokens, or None for fewer than `MIN_TEXTS` texts. `same_argmax` is the share of rows where the mixture
    and the base have the same most likely token.
    """

    texts: int
    tokens: int
    exits: list[ExitFigures]
    original_perplexity: float
    perplexity: float
    price: float
    price_error: float | None
    depth: float
    same_argmax: float


@torch.no_grad()
def measure(model: WithExits, stream: Windows, context: int, num_texts: int) -> Measured:
    parts = [
        _measure_rows(model, model.rows(stream.batch(window, 1, context)))
        for window in range(stream.num_windows(context))
    ]
    nll_RE, kl_RE, p_RE, mix_R, same_R = (torch.cat(part).double() for part in zip(*parts, strict=True))
    layers = list(model.model.config.exit_layers or [])
    means = zip(layers, nll_RE.mean(0).exp(), kl_RE.mean(0), p_RE.mean(0), strict=True)
    exits = [ExitFigures(layer, *(round(float(value), 4) for value in values)) for layer, *values in means]
    gap_R = mix_R - nll_RE[:, -1]
    price = math.expm1(gap_R.mean().item())
    error = (1 + price) * gap_R.std().item() / math.sqrt(len(gap_R))
    return Measured(
        texts=num_texts,
        tokens=len(mix_R),
        exits=exits,
        original_perplexity=math.exp(nll_RE[:, -1].mean().item()),
        perplexity=math.exp(mix_R.mean().item()),
        price=price,
        price_error=error if num_texts >= MIN_TEXTS else None,
        depth=float((p_RE.mean(0) * torch.tensor(layers)).sum() / layers[-1]),
        same_argmax=same_R.mean().item(),
    )


def _measure_rows(model: WithExits, rows: TeacherRows) -> tuple[Tensor, ...]:
    log_p_RE = log_exit_probs(model.route(rows.early))
    chunks = zip(*(x.split(CHUNK_ROWS) for x in (log_p_RE, rows.target_R, *model.outputs(rows))), strict=True)
    results = [_measure_chunk(model.head, *chunk) for chunk in chunks]
    return tuple(map(torch.cat, zip(*results, strict=True)))


def _measure_chunk(head_VD: Tensor, log_p_RE: Tensor, target_R: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    """Return −log π_k of the targets, KL from the base, p_k, −log π_mix of the targets, and whether the argmax of the
    mixture is that of the base. The first three are [R, E], the others [R].
    """
    logits_REV = torch.stack([F.linear(o_RD.to(head_VD.dtype), head_VD).float() for o_RD in outputs], 1)
    log_REV = logits_REV.log_softmax(-1)
    original_RV = log_REV[:, -1]
    kl_RE = (original_RV.exp()[:, None] * (original_RV[:, None] - log_REV)).sum(-1)
    log_mix_RV = mixture.log_mixture(log_p_RE, logits_REV)
    nll_RE = -log_REV.gather(2, target_R[:, None, None].expand(-1, log_REV.shape[1], 1)).squeeze(2)
    mix_R = -log_mix_RV.gather(1, target_R[:, None]).squeeze(1)
    same_R = log_mix_RV.argmax(-1) == original_RV.argmax(-1)
    return nll_RE, kl_RE, log_p_RE.exp(), mix_R, same_R


CAPTION = """KL: to the base model, in nats. Tokens: share that exits here.
In brackets: perplexity increase over the base model."""


def table(measured: Measured, kind: str) -> Table:
    """Return a table of each exit and the mixture, 80 columns wide."""
    shown = Table(kind, "depth", "perplexity", "KL", "tokens", caption=CAPTION, caption_justify="left")
    for column in shown.columns:
        column.no_wrap = True
    last = measured.exits[-1].layer
    for exit_ in measured.exits:
        numbers = (f"{exit_.layer / last:.2f}", f"{exit_.perplexity:.4g}", f"{exit_.kl:.2f}")
        shown.add_row(f"layer {exit_.layer}", *numbers, f"{exit_.share:.0%}")
    error = "" if measured.price_error is None else f" ± {measured.price_error:.1%}"
    price = f"{measured.perplexity:.4g} ({measured.price:+.1%}{error})"
    shown.add_row("mixture", f"{measured.depth:.3f}", price, "", "")
    return shown
