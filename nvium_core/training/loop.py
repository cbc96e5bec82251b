"""The training loop: optimiser steps, log, checkpoints and resumption, for `nvium train` and `nvium retrofit`."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nvium_core.errors import TrainingError
from nvium_core.training.data.windows import Batch, Windows
from nvium_core.training.loggers import KINDS, Report, RunLog
from nvium_core.training.objective import ObjectiveResult, Phase
from nvium_core.training.optimizer import BetaControl
from nvium_core.training.recipes.recipe import Recipe
from nvium_core.training.run_folder import STATE, State, differences, read_state, restore, write_state

SAVE_SECONDS = 300


@dataclass(kw_only=True, eq=False)
class TrainingLoop(ABC):
    """A run in progress: model, optimisers, β and the current step.

    - `objective`: computes loss and metrics from a batch and a phase.
    - `clipped`: groups of parameters. Each group's gradient is clipped to `recipe.optimizer.clip_norm`.
    - `checkpointed`: the module whose trainable parameters a checkpoint contains.
    - `seconds`: time since the start of the run, without interruptions. `saved`: its value at the last checkpoint.
    """

    recipe: Recipe
    folder: Path
    stream: Windows
    checkpointed: nn.Module
    objective: Callable[[Batch, Phase], ObjectiveResult]
    optimizers: Sequence[Optimizer]
    clipped: Sequence[Sequence[nn.Parameter]]
    beta: BetaControl
    rows_per_pass: int
    autocast_dtype: torch.dtype = torch.float32
    loggers: Sequence[str] = ()
    step: int = 0
    seconds: float = 0.0
    saved: float = 0.0

    changeable: ClassVar[Set[str]] = frozenset()
    """Settings in the description that may change when a run resumes."""

    @property
    def device(self) -> torch.device:
        return next(self.checkpointed.parameters()).device

    @property
    def num_steps(self) -> int:
        return self.recipe.num_steps

    @property
    def progress(self) -> float:
        return self.step / self.num_steps

    def steps(self) -> Generator[Report, None, None]:
        """Train to the end, yielding a report after every step."""
        started = time.monotonic() - self.seconds
        self.begin()
        with ExitStack() as stack:
            kinds = RunLog, *(KINDS[name] for name in self.loggers)
            logs = [stack.enter_context(closing(kind(self.folder, self.step))) for kind in kinds]
            for step in range(self.step, self.num_steps):
                report = self.train_step(self.batches_of(step)) | self.evaluation()
                self.seconds = time.monotonic() - started
                report["seconds"] = round(self.seconds, 2)
                for log in logs:
                    log.write(report)
                if self.is_checkpoint_due:
                    self.save()
                yield report
        self.save()

    @abstractmethod
    def begin(self) -> None:
        """Prepare the first step."""

    def evaluation(self) -> Report:
        return {}

    def advice(self, report: Report) -> str:
        """Return a warning about the last steps, or nothing."""
        return ""

    @property
    def is_checkpoint_due(self) -> bool:
        """Return True at least ten times in a run, every `checkpoint_every` steps, and every five minutes."""
        is_late = self.seconds - self.saved >= SAVE_SECONDS
        return is_late or self.step % min(self.recipe.checkpoint_every, self.tenth) == 0

    @property
    def tenth(self) -> int:
        return max(1, self.num_steps // 10)

    def batches_of(self, step: int) -> list[Batch]:
        """Return the windows of a step, in batches of at most `rows_per_pass` tokens."""
        num_windows, per_pass = self.recipe.windows_per_step, self.rows_per_pass // self.stream.context or 1
        batches = (
            self.stream.batch(step * num_windows + first, min(per_pass, num_windows - first))
            for first in range(0, num_windows, per_pass)
        )
        return [batch.pinned_for(self.device) for batch in batches]

    def train_step(self, batches: Sequence[Batch]) -> Report:
        """Take one optimiser step. Gradients are accumulated over the batches."""
        started, phase, rate = time.monotonic(), self.phase(), self.recipe.learning_rate
        metrics = self.read(self.accumulate(batches, phase) | {"beta": phase.beta})
        self.update()
        if "mean_depth" in metrics and not self.recipe.router_warmup.active(phase.step, self.num_steps):
            self.beta.observe_depth(metrics["mean_depth"], self.num_steps)
        return {
            "step": self.step,
            **{name: rounded(value) for name, value in metrics.items()},
            "learning_rate": rate.maximum * rate.share_at(self.progress),  # except that of Muon
            "tokens_per_second": round(self.recipe.tokens_per_step / (time.monotonic() - started)),
        }

    def phase(self) -> Phase:
        """Return this step's phase. During the router warm-up β is 0, and afterwards α is 0."""
        warmup = self.recipe.router_warmup
        weights = (warmup.alpha, 0.0) if warmup.active(self.step, self.num_steps) else (0.0, self.beta.beta)
        alpha, beta = (torch.tensor(weight, device=self.device) for weight in weights)
        return Phase(self.step, self.progress, alpha, beta)

    def accumulate(self, batches: Sequence[Batch], phase: Phase) -> dict[str, Tensor]:
        """Accumulate gradients batch by batch, and clip them.

        Return metrics, as means over all tokens, and the sum of the groups' norms before clipping.
        """
        counts = [batch.counted.sum().to(self.device, non_blocking=True) for batch in batches]
        num_counted = torch.stack(counts).sum().clamp_min(1)
        metrics: dict[str, Tensor] = {}
        for batch, count in zip(batches, counts, strict=True):
            share = count / num_counted
            with self.autocast():
                result = self.objective(batch.to(self.device), phase)
            (share * result.loss).backward()
            for name, value in {"loss": result.loss.detach(), **result.metrics}.items():
                metrics[name] = metrics.get(name, 0) + share * value
        norms = [nn.utils.clip_grad_norm_(group, self.recipe.optimizer.clip_norm) for group in self.clipped]
        return metrics | {"gradient_norm": torch.stack(norms).sum()}

    def autocast(self) -> torch.autocast:
        enabled = self.autocast_dtype is not torch.float32
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=enabled)

    def read(self, metrics: dict[str, Tensor]) -> dict[str, Any]:
        """Copy the metrics to the host at once. Raise `TrainingError` if the loss or the norm is not finite."""
        flat = torch.cat([value.flatten() for value in metrics.values()]).cpu()
        parts = flat.split([value.numel() for value in metrics.values()])
        found = {name: part.view(metrics[name].shape).tolist() for name, part in zip(metrics, parts, strict=True)}
        if not math.isfinite(found["mix_loss"] + found["gradient_norm"]):
            raise TrainingError(f"the loss is not finite at step {self.step + 1}; the last checkpoint is intact")
        return found

    def update(self) -> None:
        """Step the optimisers. A group's `maximum_lr` is its rate before the first step."""
        share = self.recipe.learning_rate.share_at((self.step + 1) / self.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group.setdefault("maximum_lr", group["lr"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def save(self) -> None:
        beta = {"beta": self.beta.beta, "depth": self.beta.depth}
        own = {"recipe": self.description(), "step": self.step, "beta": beta, "seconds": self.seconds}
        write_state(self.checkpointed, self.optimizers, own, self.folder)
        self.saved = self.seconds

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one. Raise `TrainingError` if it belongs to another run."""
        state = read_state(self.folder)
        if state is None:
            return
        self.check_resumable(state)
        self.step = state["step"]
        self.seconds = self.saved = state["seconds"]
        vars(self.beta).update(state["beta"])
        restore(state, self.checkpointed, self.optimizers)

    def description(self) -> dict[str, Any]:
        """Return everything that the run's weights depend on."""
        return asdict(self.recipe)

    def check_resumable(self, state: State) -> None:
        """Raise `TrainingError` if a checkpoint belongs to another run."""
        if others := differences(state["recipe"], self.description()) - self.changeable:
            place, names = self.folder / STATE, ", ".join(sorted(others))
            raise TrainingError(f"{place}: belongs to a run with another {names}; choose another folder")


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the hardware supports it, else float32, which is three times as fast as emulated bfloat16."""
    if device.type != "cpu":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def rounded(value: float | list[float]) -> float | list[float]:
    return [round(number, 5) for number in value] if isinstance(value, list) else round(value, 5)
