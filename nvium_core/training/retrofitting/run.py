"""A retrofit: exits and a drafter are fitted by least squares and learn what the original says; then routers learn, and
the backbone if asked.

Routers learn −log π_mix with a price on depth that leads them to the depth asked for. Early exits that learn the text
learn −log π_mix with them, from each row in proportion to p_k π_k / π_mix, beside a part of the KL. A frozen backbone
and its last exit stay as they are. A backbone with low-rank updates learns, with all exits, what the original says of
the rows that are sent to each exit: Σ p_k KL(π ‖ π_k), which is no less than KL(π ‖ π_mix). No exit learns from p_k
alone, so that one that is not chosen learns on. In TARGET stands a model that can be served, from the first minutes on;
TARGET/retrofit/ has what is needed to go on.
"""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast

from nvium_core.model import mixture
from nvium_core.model.exits import Adapter
from nvium_core.training.checkpoint import STATE, read_state, write_state
from nvium_core.training.data.tokens import differences
from nvium_core.training.data.windows import Windows
from nvium_core.training.errors import TrainingError
from nvium_core.training.interruption import Interruption
from nvium_core.training.objective.beta import DepthSteering, haste
from nvium_core.training.reports import Lines, Report, RunLog, describe, progress_bar
from nvium_core.training.resumption import check_circumstances, machine
from nvium_core.training.retrofitting.folder import STATE_FOLDER, write_in_place
from nvium_core.training.retrofitting.least_squares import RowFit, hold, hold_map
from nvium_core.training.retrofitting.model import WithExits
from nvium_core.training.retrofitting.settings import RetrofitSettings
from nvium_core.training.schedule import LearningRate

TOKENS_PER_STEP = 4_096
FIT_SHARE, MAX_FIT_TOKENS = 0.25, 32_768
"""Of the text, for the least squares."""

ROUTERS_FROM = 0.4
"""The share of the run after which routers learn too, and the backbone."""

RATE = LearningRate(maximum=5e-5, warmup=0.05, final_ratio=0.05)
"""Of exits: rows after a trained final norm are large, and at 1e-3 one step undoes the least squares."""

ROUTER_RATE, BACKBONE_RATE = 3e-4, 1e-3
LEAST_WEIGHT = 0.1
"""Of an exit's KL where the backbone adapts, beside p_k."""

TEXT_KL_WEIGHT = 0.3
"""Of exits' KL beside −log π_mix, where they learn the text."""

CLIP_NORM = 1.0
FIRST_PRICE = 0.3
SAVE_SECONDS = 300


class RetrofitRun:
    def __init__(
        self,
        settings: RetrofitSettings,
        model: WithExits,
        tokenizer: PreTrainedTokenizerFast,
        stream: Windows,
        context: int,
        digests: dict[str, Any],
    ) -> None:
        """`digests` are of what is read: the source's weights and the texts."""
        self.settings, self.model, self.tokenizer = settings, model, tokenizer
        self.stream, self.context = stream, context
        self.windows_of_a_step = max(1, TOKENS_PER_STEP // context)
        self.num_steps = max(1, round(settings.tokens / (self.windows_of_a_step * context)))
        groups = [
            {"params": model.exit_weights(), "maximum": RATE.maximum},
            {"params": [*model.drafter.parameters()], "maximum": RATE.maximum},
            {"params": model.router_weights(), "maximum": ROUTER_RATE},
        ]
        if model.updates:
            groups.append({"params": [*model.updates.parameters()], "maximum": BACKBONE_RATE})
        self.optimizer = AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.price = DepthSteering(
            beta=FIRST_PRICE, target=settings.depth, haste=haste(self.num_steps), maximum=10.0, minimum=1e-3
        )
        self.step = 0
        self.folder = settings.target / STATE_FOLDER
        self.recipe = described(settings) | digests
        self.circumstances = machine(torch.device("cpu"))

    def steps(self) -> Generator[Report, None, None]:
        """Train to the end; yields a report after every step."""
        if not self.step:
            self.fit()
            self.save()
        log, saved = RunLog(self.folder, self.step), time.monotonic()
        try:
            while self.step < self.num_steps:
                report = self.train_step()
                log.write(report)
                yield report
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
        finally:
            log.close()
        self.save()

    @torch.no_grad()
    def fit(self) -> None:
        """The least-squares start of every early exit, and of the drafter."""
        num_windows = self.stream.num_windows(self.context)
        num_read = min(MAX_FIT_TOKENS // self.context, max(1, round(FIT_SHARE * num_windows)))
        width, drafter = self.model.model.config.hidden_size, self.model.drafter
        fits, draft_fit = [RowFit(width) for _ in self.model.early], RowFit(2 * width, width)
        for window in range(num_read):
            rows = self.model.rows(self.stream.batch(window, 1, self.context))
            for fit, x_RD in zip(fits, rows.early, strict=True):
                fit.add(x_RD, rows.last_RD)
            draft_fit.add(drafter.inputs(rows.before_RD, rows.token_RD), rows.last_RD)
        hold(drafter.up, drafter.down, draft_fit.solve())
        for fit, exit_ in zip(fits, self.model.early, strict=True):
            assert isinstance(exit_.adapter, Adapter)
            hold_map(exit_.adapter, fit.solve())

    def train_step(self) -> Report:
        started, progress = time.monotonic(), self.step / self.num_steps
        routes = progress >= ROUTERS_FROM
        figures = [self._pass(window, routes=routes) for window in range(self.windows_of_a_step)]
        means = {name: torch.stack([each[name] for each in figures]).mean(0) for name in figures[0]}
        self._update(RATE.share_at((self.step + 1) / self.num_steps), means)
        price = self.price.beta
        if routes:
            self.price.observe_depth(float(means["mean_depth"]))
        self.step += 1
        seconds = time.monotonic() - started
        return {
            "step": self.step,
            **{name: [round(x, 5) for x in value.flatten().tolist()] for name, value in means.items() if value.dim()},
            **{name: round(float(value), 5) for name, value in means.items() if not value.dim()},
            "beta": round(price if routes else 0.0, 5),
            "tokens_per_second": round(self.windows_of_a_step * self.context / seconds),
        }

    def _pass(self, window: int, *, routes: bool) -> dict[str, Tensor]:
        """The gradients of one window; its figures."""
        batch = self.stream.batch(self.step * self.windows_of_a_step + window, 1, self.context)
        updates = self.model.updates if routes else None
        losses = self.model.losses(self.model.rows(batch, adapts=updates is not None))
        nll_RE = losses.nll_RE if self.settings.exits_learn == "text" else losses.nll_RE.detach()
        mix = mixture.mixture_nll(losses.log_p_RE, nll_RE).mean()
        depth = mixture.mean_depth(losses.log_p_RE, self.model.model.config.exit_layers or []).mean()
        kl_RE = losses.kl_RE * self._kl_weights(losses.log_p_RE.detach()) if routes else losses.kl_RE
        loss = kl_RE.sum(1).mean() + losses.draft_kl_R.mean() + (mix + self.price.beta * depth if routes else 0.0)
        (loss / self.windows_of_a_step).backward()
        if updates:
            updates.take_gradients()
        return {
            "mix_loss": mix.detach(),
            "original_loss": losses.original_nll_R.mean().detach(),
            "mean_depth": depth.detach(),
            "kl": losses.kl_RE.mean(0).detach(),
            "draft_kl": losses.draft_kl_R.mean().detach(),
            "exit_probs": losses.log_p_RE.exp().mean(0).detach(),
        }

    def _kl_weights(self, log_p_RE: Tensor) -> Tensor | float:
        """Beside −log π_mix."""
        if self.model.updates:
            return log_p_RE.exp() + LEAST_WEIGHT
        return TEXT_KL_WEIGHT if self.settings.exits_learn == "text" else 1.0

    def _update(self, share: float, means: dict[str, Tensor]) -> None:
        norms = [nn.utils.clip_grad_norm_(group["params"], CLIP_NORM) for group in self.optimizer.param_groups]
        norm = torch.stack(norms).sum()
        if not bool(torch.isfinite(norm) & torch.isfinite(means["kl"]).all()):
            raise TrainingError(f"the loss is not finite at step {self.step + 1}; the last checkpoint is intact")
        for group in self.optimizer.param_groups:
            group["lr"] = group["maximum"] * share
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.model.updates:
            self.model.updates.merge()

    def save(self) -> None:
        """The checkpoint, and the model as it is now."""
        added = {
            name: weight
            for name, weight in self.model.model.state_dict().items()
            if name.startswith(("exits.", "drafter."))
        }
        state = {
            "model": added,
            "updates": self.model.updates.state_dict() if self.model.updates else {},
            "optimizers": self.optimizer.state_dict(),
            "beta": self.price.state(),
            "step": self.step,
            "recipe": self.recipe,
            "run": self.circumstances,
        }
        write_state(state, self.folder)
        write_in_place(self.model.as_stored(), self.tokenizer, self.settings.target)

    def resume(self, *, accept_changes: bool = False) -> None:
        """Go on from the last checkpoint, if there is one. Raises `TrainingError` for one of another retrofit, or of
        one begun on another machine."""
        state = read_state(self.folder)
        if state is None:
            return
        if others := differences(state["recipe"], self.recipe):
            raise TrainingError(f"{self.settings.target}: holds a retrofit of other {', '.join(sorted(others))}")
        if not accept_changes:
            check_circumstances(state["run"], self.circumstances, self.folder / STATE)
        self.model.model.load_state_dict(self.model.model.state_dict() | state["model"])
        if self.model.updates:
            self.model.updates.load_state_dict(state["updates"])
            self.model.updates.merge()
        self.optimizer.load_state_dict(state["optimizers"])
        self.price.restore(state["beta"])
        self.step = state["step"]


def described(settings: RetrofitSettings) -> dict[str, Any]:
    """All that a run depends on."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()} | {
        "target": ""
    }


def show(run: RetrofitRun) -> None:
    """Train to the end beside a progress bar. Raises `KeyboardInterrupt` after a checkpoint if a signal asks for it."""
    console = Console(stderr=True)
    with progress_bar(console) as bar, Interruption() as interruption, closing(run.steps()) as steps:
        task = bar.add_task("least squares", total=run.num_steps, completed=run.step)
        lines = Lines(console, run.num_steps)
        for report in steps:
            bar.update(task, completed=run.step, description=describe(report))
            if bar.disable:
                lines.tell(run.step, report)
            if interruption.is_requested:
                run.save()
                console.print(f"stopped after step {run.step}; the same command goes on", highlight=False)
                raise KeyboardInterrupt
