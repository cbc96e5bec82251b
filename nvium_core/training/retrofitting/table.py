"""Measure a retrofit on held-out text: each exit alone, the mixture, and the mixture's perplexity increase.

Shapes: R rows, C rows of a chunk, D width, E exits, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from nvium_core.model import mixture
from nvium_core.training.data.windows import Windows
from nvium_core.training.retrofitting.model import CHUNK_ROWS, WithExits

MIN_TEXTS = 3  # fewer texts have no standard error

CAPTION = """KL: to the base model, in nats. Tokens: share that exits here.
In brackets: perplexity increase over the base model."""


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
    over paired tokens, or None for fewer than `MIN_TEXTS` texts.
    """

    texts: int
    tokens: int
    exits: list[ExitFigures]
    original_perplexity: float
    perplexity: float
    price: float
    price_error: float | None
    depth: float


@torch.no_grad()
def measure(model: WithExits, stream: Windows, context: int, num_texts: int) -> Measured:
    log_p, chunks = list[Tensor](), list[tuple[Tensor, Tensor]]()
    for window in range(stream.num_windows(context)):
        rows = model.rows(stream.batch(window, 1, context))
        log_p.append(mixture.log_exit_probs(model.route(rows)))
        parts = (x.split(CHUNK_ROWS) for x in (torch.stack(model.outputs(rows), 1), rows.target_R))
        chunks += [_measure_chunk(model.head, *chunk) for chunk in zip(*parts, strict=True)]
    log_p_RE, nll_RE, kl_RE = (torch.cat(part).double() for part in (log_p, *map(list, zip(*chunks, strict=True))))
    mix_R = mixture.mixture_nll(log_p_RE, nll_RE)
    layers = list(model.model.config.exit_layers or [])
    means = zip(layers, nll_RE.mean(0).exp(), kl_RE.mean(0), log_p_RE.exp().mean(0), strict=True)
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
        depth=mixture.mean_depth(log_p_RE, layers).mean().item(),
    )


def _measure_chunk(head_VD: Tensor, output_CED: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return −log π_k of the targets and the KL from the base, [C, E] each."""
    log_CEV = F.linear(output_CED.to(head_VD.dtype), head_VD).float().log_softmax(-1)
    base_C1V = log_CEV[:, -1:]
    nll_CE = -log_CEV.gather(2, target_C[:, None, None].expand(-1, log_CEV.shape[1], 1)).squeeze(2)
    return nll_CE, (base_C1V.exp() * (base_C1V - log_CEV)).sum(-1)


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
