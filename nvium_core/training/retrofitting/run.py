"""A retrofit: initialise exits by least squares, train them on the base's distribution, then train routers as well.

Routers minimise −log π_mix plus β times the depth. β is steered so that the depth approaches the requested depth. If
exits also learn the text, they then minimise −log π_mix plus a fraction of the KL. The backbone and its last exit are
frozen. After the first minutes, TARGET contains exits that can be served. TARGET/retrofit/ contains the checkpoint and
the log.
"""

from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from nvium_core.model import mixture
from nvium_core.model.exits import Adapter
from nvium_core.model.exits_file import write_exits
from nvium_core.training.data.windows import Batch, Windows
from nvium_core.training.initial import shape_of
from nvium_core.training.loop import TrainingLoop
from nvium_core.training.objective.beta import BetaControl, BetaSettings
from nvium_core.training.objective.loss import ObjectiveResult, Phase
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.options import RetrofitSettings
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.retrofitting.least_squares import LeastSquares, set_map
from nvium_core.training.retrofitting.model import WithExits
from nvium_core.training.schedule import LearningRate, RouterWarmup

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


class RetrofitRun(TrainingLoop):
    """The training of early exits. A window is a pass of its own."""

    def __init__(
        self, settings: RetrofitSettings, model: WithExits, stream: Windows, context: int, about: dict[str, Any]
    ) -> None:
        """`about` is the content of exits.json. It includes digests of the base and of the texts."""
        self.settings, self.model, self.context, self.about = settings, model, context, about
        parts = model.exit_weights(), model.router_weights()
        groups = [{"params": each, "lr": rate} for each, rate in zip(parts, (RATE.maximum, ROUTER_RATE), strict=True)]
        recipe = recipe_of(settings, model, context)
        super().__init__(
            recipe=recipe,
            folder=settings.target / STATE_FOLDER,
            stream=stream,
            checkpointed=model.model,
            objective=partial(retrofit_objective, model, learns_text=settings.exits_learn == "text"),
            optimizers=[AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)],
            clipped=parts,
            beta=BetaControl.of(recipe.beta, recipe.num_steps, MAX_BETA),
            rows_per_pass=context,
        )

    def begin(self) -> None:
        if not self.step:
            self.fit()
            self.save()

    @torch.no_grad()
    def fit(self) -> None:
        num_windows = self.stream.num_windows(self.context)
        num_read = min(MAX_FIT_TOKENS // self.context, max(1, round(FIT_SHARE * num_windows)))
        fits = [LeastSquares(self.model.model.config.hidden_size) for _ in self.model.early]
        for window in range(num_read):
            rows = self.model.rows(self.stream.batch(window, 1, self.context))
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
        tensors = {name: weight.to(self.model.stored) for name, weight in self.model.early_tensors().items()}
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
    losses = model.losses(model.rows(batch))
    nll_RE = losses.nll_RE if learns_text else losses.nll_RE.detach()
    mix = mixture.mixture_nll(losses.log_p_RE, nll_RE).mean()
    depth = mixture.mean_depth(losses.log_p_RE, model.model.config.exit_layers or []).mean()
    kl_weight = TEXT_KL_WEIGHT if trains_routers and learns_text else 1.0
    loss = kl_weight * losses.kl_RE.sum(1).mean() + (mix + phase.beta * depth if trains_routers else 0.0)
    metrics = {
        "mix_loss": mix.detach(),
        "exit_losses": losses.nll_RE.mean(0).detach(),
        "original_loss": losses.original_nll_R.mean().detach(),
        "mean_depth": depth.detach(),
        "kl": losses.kl_RE.mean(0).detach(),
        "exit_probs": losses.log_p_RE.exp().mean(0).detach(),
    }
    return ObjectiveResult(loss, metrics)
