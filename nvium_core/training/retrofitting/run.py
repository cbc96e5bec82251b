"""A retrofit: initialise exits by least squares, train them on the base's distribution, then train routers as well.

Routers minimise −log π_mix plus β times the depth. β is steered so that the depth approaches the requested depth. If
exits also learn the text, they then minimise −log π_mix plus a fraction of the KL. The backbone and its last exit are
frozen. After the first minutes, TARGET contains exits that can be served. TARGET/retrofit/ contains the checkpoint and
the log.
"""

import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from nvium_core.model import mixture
from nvium_core.model.exits import Adapter
from nvium_core.model.exits_file import write_exits
from nvium_core.training.checkpoint import read_state, write_state
from nvium_core.training.data.tokens import differences
from nvium_core.training.data.windows import Windows
from nvium_core.training.errors import TrainingError
from nvium_core.training.objective.beta import DepthSteering, speed_up
from nvium_core.training.reports import Report, RunLog
from nvium_core.training.retrofitting.least_squares import LeastSquares, set_map
from nvium_core.training.retrofitting.model import WithExits
from nvium_core.training.retrofitting.settings import RetrofitSettings
from nvium_core.training.schedule import LearningRate

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
INITIAL_BETA = 0.3
SAVE_SECONDS = 300


class RetrofitRun:
    def __init__(
        self, settings: RetrofitSettings, model: WithExits, stream: Windows, context: int, about: dict[str, Any]
    ) -> None:
        """`about` is the content of exits.json. It includes digests of the base and of the texts."""
        self.settings, self.model, self.stream, self.context, self.about = settings, model, stream, context, about
        self.windows_of_a_step = max(1, TOKENS_PER_STEP // context)
        self.num_steps = max(1, round(settings.tokens / (self.windows_of_a_step * context)))
        groups = [
            {"params": model.exit_weights(), "maximum": RATE.maximum},
            {"params": model.router_weights(), "maximum": ROUTER_RATE},
        ]
        self.optimizer = AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        faster = speed_up(self.num_steps)
        self.steering = DepthSteering(beta=INITIAL_BETA, target=settings.depth, speed_up=faster, maximum=10.0)
        self.step = 0
        self.folder = settings.target / STATE_FOLDER
        self.recipe = about["settings"] | {"base": about["base"]["digest"], "text": about["text"]}

    def steps(self) -> Generator[Report, None, None]:
        """Train to the end, yielding a report after every step."""
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
        """Initialise every early exit's adapter by least squares."""
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

    def train_step(self) -> Report:
        started, progress = time.monotonic(), self.step / self.num_steps
        trains_routers = progress >= ROUTERS_FROM
        metrics = [self._pass(window, trains_routers) for window in range(self.windows_of_a_step)]
        means = {name: torch.stack([each[name] for each in metrics]).mean(0) for name in metrics[0]}
        self._update(RATE.share_at((self.step + 1) / self.num_steps), means)
        beta = self.steering.beta
        if trains_routers:
            self.steering.observe_depth(float(means["mean_depth"]))
        self.step += 1
        seconds = time.monotonic() - started
        return {
            "step": self.step,
            **{name: [round(x, 5) for x in value.flatten().tolist()] for name, value in means.items() if value.dim()},
            **{name: round(float(value), 5) for name, value in means.items() if not value.dim()},
            "beta": round(beta if trains_routers else 0.0, 5),
            "tokens_per_second": round(self.windows_of_a_step * self.context / seconds),
        }

    def _pass(self, window: int, trains_routers: bool) -> dict[str, Tensor]:
        """Add the gradients of one window to the step's gradients. Return the window's metrics."""
        batch = self.stream.batch(self.step * self.windows_of_a_step + window, 1, self.context)
        losses = self.model.losses(self.model.rows(batch))
        learns_text = self.settings.exits_learn == "text"
        nll_RE = losses.nll_RE if learns_text else losses.nll_RE.detach()
        mix = mixture.mixture_nll(losses.log_p_RE, nll_RE).mean()
        depth = mixture.mean_depth(losses.log_p_RE, self.model.model.config.exit_layers or []).mean()
        kl_weight = TEXT_KL_WEIGHT if trains_routers and learns_text else 1.0
        loss = kl_weight * losses.kl_RE.sum(1).mean() + (mix + self.steering.beta * depth if trains_routers else 0.0)
        (loss / self.windows_of_a_step).backward()
        return {
            "mix_loss": mix.detach(),
            "original_loss": losses.original_nll_R.mean().detach(),
            "mean_depth": depth.detach(),
            "kl": losses.kl_RE.mean(0).detach(),
            "exit_probs": losses.log_p_RE.exp().mean(0).detach(),
        }

    def _update(self, share: float, means: dict[str, Tensor]) -> None:
        norms = [nn.utils.clip_grad_norm_(group["params"], CLIP_NORM) for group in self.optimizer.param_groups]
        norm = torch.stack(norms).sum()
        if not bool(torch.isfinite(norm) & torch.isfinite(means["kl"]).all()):
            raise TrainingError(f"the loss is not finite at step {self.step + 1}; the last checkpoint is intact")
        for group in self.optimizer.param_groups:
            group["lr"] = group["maximum"] * share
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self) -> None:
        """Write a checkpoint and the current exits."""
        state = {
            "model": self.model.early_tensors(),
            "optimizers": self.optimizer.state_dict(),
            "beta": self.steering.state(),
            "step": self.step,
            "recipe": self.recipe,
        }
        write_state(state, self.folder)
        self.write()

    def write(self, **measured: Any) -> None:
        """Write the exits to the target folder, in the base's dtype."""
        tensors = {name: weight.to(self.model.stored) for name, weight in self.model.early_tensors().items()}
        write_exits(tensors, self.about | measured, self.settings.target)

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one. Raise `TrainingError` if its settings or texts differ."""
        state = read_state(self.folder)
        if state is None:
            return
        if others := differences(state["recipe"], self.recipe):
            raise TrainingError(
                f"{self.settings.target}: contains a retrofit with another {', '.join(sorted(others))}; "
                "choose another folder"
            )
        self.model.model.load_state_dict(self.model.model.state_dict() | state["model"])
        self.optimizer.load_state_dict(state["optimizers"])
        self.steering.restore(state["beta"])
        self.step = state["step"]
