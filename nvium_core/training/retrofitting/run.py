"""A retrofit: initialise exits by least squares, train them on the base's distribution, then train routers as well.

A linear map closes most of the gap between a middle layer and the last layer, without gradient steps. An adapter can
represent a linear map exactly: SiLU(z) − SiLU(−z) = z, so two inner units together compute a linear function.

Routers minimise −log π_mix plus β times the depth. β is steered so that the depth approaches the requested depth. If
exits also learn the text, they then minimise −log π_mix plus a fraction of the KL. The backbone and its last exit are
frozen. After the first minutes, TARGET contains exits that can be served. TARGET/retrofit/ contains the checkpoint and
the log.

Held-out text then measures each exit alone, the mixture, and the mixture's perplexity increase.

Shapes: R rows, C rows of a chunk, D width, E exits, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from nvium_core.model import mixture
from nvium_core.model.exits import Adapter
from nvium_core.model.source import write_exits
from nvium_core.options import RetrofitSettings
from nvium_core.training.data.windows import Batch, Windows
from nvium_core.training.initial import shape_of
from nvium_core.training.loop import TrainingLoop
from nvium_core.training.objective import ObjectiveResult, Phase
from nvium_core.training.optimizer import BetaControl, BetaSettings, LearningRate, OptimizerSettings, RouterWarmup
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.retrofitting.model import CHUNK_ROWS, WithExits

TOKENS_PER_STEP = 4_096
FIT_SHARE, MAX_FIT_TOKENS = 0.25, 32_768
"""Least squares uses this share of the training tokens, and at most this number of tokens."""

ROUTERS_FROM = 0.4  # share of the run after which routers train too

RATE = LearningRate(maximum=5e-5, warmup=0.05, final_ratio=0.05)
"""Learning rate of exits. At 1e-3, a single step would undo the least-squares fit, because normed rows are large."""

ROUTER_RATE = 3e-4
TEXT_KL_WEIGHT = 0.3  # weight of the KL in the loss while exits also learn the text

STATE_FOLDER = "retrofit"
CLIP_NORM = 1.0
INITIAL_BETA, MAX_BETA = 0.3, 10.0

RIDGE = 1e-4  # ridge penalty, as a share of the rows' mean square

MIN_TEXTS = 3  # fewer texts have no standard error

CAPTION = """KL: to the base model, in nats. Tokens: share that exits here.
In brackets: perplexity increase over the base model."""


class RetrofitRun(TrainingLoop):
    """The training of early exits. A window is a pass of its own."""

    def __init__(self, settings: RetrofitSettings, model: WithExits, stream: Windows, about: dict[str, Any]) -> None:
        """`about` is the content of exits.json. It includes digests of the base and of the texts."""
        self.settings, self.model, self.about = settings, model, about
        parts = model.exit_weights(), model.router_weights()
        groups = [{"params": each, "lr": rate} for each, rate in zip(parts, (RATE.maximum, ROUTER_RATE), strict=True)]
        recipe = recipe_of(settings, model, stream.context)
        super().__init__(
            recipe=recipe,
            folder=settings.target / STATE_FOLDER,
            stream=stream,
            checkpointed=model.model,
            objective=partial(retrofit_objective, model, learns_text=settings.exits_learn == "text"),
            optimizers=[AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)],
            clipped=parts,
            beta=BetaControl(INITIAL_BETA, settings.depth, MAX_BETA),
            rows_per_pass=stream.context,
        )

    def begin(self) -> None:
        if not self.step:
            self.fit()
            self.save()

    @torch.no_grad()
    def fit(self) -> None:
        num_read = min(MAX_FIT_TOKENS // self.stream.context, max(1, round(FIT_SHARE * self.stream.num_windows)))
        fits = [LeastSquares(self.model.model.config.hidden_size) for _ in self.model.early]
        for window in range(num_read):
            rows = self.model.rows(self.stream.batch(window, 1))
            for fit, x_RD in zip(fits, rows.early, strict=True):
                fit.add(x_RD, rows.last_RD)
        for fit, exit_ in zip(fits, self.model.early, strict=True):
            assert isinstance(exit_.adapter, Adapter)
            set_map(exit_.adapter, fit.solve())

    def save(self) -> None:
        super().save()
        self.write()

    def write(self, **measured: Any) -> None:
        """Write the exits to the target folder, in the base's dtype."""
        trained = {name: each for name, each in self.model.model.named_parameters() if each.requires_grad}
        tensors = {name: weight.detach().to(self.model.stored) for name, weight in trained.items()}
        write_exits(tensors, self.about | measured, self.settings.target)

    def description(self) -> dict[str, Any]:
        return self.about["settings"] | {"base": self.about["base"]["digest"], "text": self.about["text"]}


def recipe_of(settings: RetrofitSettings, model: WithExits, context: int) -> Recipe:
    tokens_per_step = max(1, TOKENS_PER_STEP // context) * context
    return Recipe(
        shape=shape_of(model.model.config, context),
        initial=settings.source,
        total_tokens=max(1, round(settings.tokens / tokens_per_step)) * tokens_per_step,
        tokens_per_step=tokens_per_step,
        learning_rate=RATE,
        router_warmup=RouterWarmup(share=ROUTERS_FROM, alpha=0.0, min_steps=0),
        beta=BetaSettings(initial=INITIAL_BETA, depth=settings.depth),
        optimizer=OptimizerSettings(weight_decay=0.0, clip_norm=CLIP_NORM),
        seed=settings.seed,
    )


def retrofit_objective(model: WithExits, batch: Batch, phase: Phase, *, learns_text: bool) -> ObjectiveResult:
    """Compute the KL and, once routers train, −log π_mix + β L_compute. Exits learn the text only if `learns_text`."""
    trains_routers = phase.progress >= ROUTERS_FROM
    kl_RE, nll_RE, log_p_RE = model.losses(model.rows(batch))
    mix = mixture.mixture_nll(log_p_RE, nll_RE if learns_text else nll_RE.detach()).mean()
    depth = mixture.mean_depth(log_p_RE, model.model.config.exit_layers or []).mean()
    kl_weight = TEXT_KL_WEIGHT if trains_routers and learns_text else 1.0
    loss = kl_weight * kl_RE.sum(1).mean() + (mix + phase.beta * depth if trains_routers else 0.0)
    metrics = {
        "mix_loss": mix.detach(),
        "exit_losses": nll_RE.mean(0).detach(),
        "original_loss": nll_RE[:, -1].mean().detach(),
        "mean_depth": depth.detach(),
        "kl": kl_RE.mean(0).detach(),
        "exit_probs": log_p_RE.exp().mean(0).detach(),
    }
    return ObjectiveResult(loss, metrics)


class LeastSquares:
    """Finds the matrix M that minimises Σ |x M − y|² over all added rows."""

    def __init__(self, width: int) -> None:
        self._xx = torch.zeros(width, width, dtype=torch.float64)
        self._xy = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows x and y, each [R, D]."""
        self._xx += (x.T @ x).double()
        self._xy += (x.T @ y).double()

    def solve(self) -> Tensor:
        """Return M [D, D] in float64."""
        ridge = RIDGE * self._xx.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        return torch.linalg.solve(self._xx + ridge * torch.eye(len(self._xx)), self._xy)


@torch.no_grad()
def set_map(adapter: Adapter, map_DD: Tensor) -> None:
    """Make the adapter x + down(SiLU(up(x))) equal to x M. With fewer than 2 D inner units, approximate M."""
    up, down = adapter.up, adapter.down
    left, sizes, right = torch.linalg.svd(map_DD.double() - torch.eye(len(map_DD), dtype=torch.float64))
    rank = min(len(sizes), len(up.weight) // 2)
    root = sizes[:rank].sqrt()
    into, out = (left[:, :rank] * root).T, right[:rank].T * root
    up.weight.zero_()
    down.weight.zero_()
    up.weight[: 2 * rank].copy_(torch.cat([into, -into]))
    down.weight[:, : 2 * rank].copy_(torch.cat([out, -out], 1))


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
def measure(model: WithExits, stream: Windows, num_texts: int) -> Measured:
    log_p, chunks = list[Tensor](), list[tuple[Tensor, Tensor]]()
    for window in range(stream.num_windows):
        rows = model.rows(stream.batch(window, 1))
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
