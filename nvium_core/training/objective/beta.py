"""β, the weight of L_compute: fixed, steered to a mean depth, or adapted to a dense model's losses.

Imports no torch.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvium_core.training.errors import TrainingError

VALIDATION_LOSS = "validation_loss"  # field of log.jsonl: L_mix on the validation text
GAIN = 0.05  # gain of the depth controller per step, in runs of at least LONG_RUN steps
SMOOTHING = 0.98  # decay of the depth's moving average per step, in runs of at least LONG_RUN steps
LONG_RUN = 3000  # runs of fewer steps steer faster

RISE, FALL, FLAT, LARGEST_MOVE, LARGEST_BETA = 8.0, 4.0, 0.005, 100.0, 10.0
"""Constants of the adaptive β (paper, section on the 1.5B model)."""


@dataclass(frozen=True, kw_only=True)
class BetaSettings:
    """β's initial value.

    If `depth` is not 0, β is steered to this mean depth. If `adaptive`, β adapts to a dense model's losses.
    """

    initial: float
    depth: float = 0.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.initial < 0 or not 0 <= self.depth < 1:
            raise ValueError(
                f"initial must not be negative, and depth must be in [0, 1), got {self.initial} and {self.depth}"
            )
        if self.adaptive and self.depth:
            raise ValueError("β cannot be both adaptive and steered: set beta.depth=0 or beta.adaptive=false")


@dataclass(kw_only=True)
class BetaControl:
    """A fixed β. Subclasses adjust β to the depths and losses that they observe."""

    beta: float

    def observe_depth(self, depth: float) -> None:
        """Receive a step's mean depth Σ p_k l_k / L."""

    def observe_loss(self, step: int, mix_loss: float) -> None:
        """Receive the validation loss after `step` steps."""

    def state(self) -> dict[str, float | None]:
        return {"beta": self.beta}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def speed_up(num_steps: int) -> float:
    """Return the factor by which to steer faster in a short run. Models respond with a delay, hence the square root."""
    return max(1.0, math.sqrt(LONG_RUN / num_steps))


@dataclass(kw_only=True)
class DepthSteering(BetaControl):
    """An integral controller that steers the mean depth Σ p_k l_k / L to a target.

    Each step multiplies β by exp(gain · (smoothed depth − target)) and clamps it. `speed_up` multiplies the gain and
    divides the smoothing window. So the product of gain and window, which decides whether β overshoots, stays the same.
    """

    target: float
    speed_up: float = 1.0
    minimum: float = 1e-3
    maximum: float = 1.0
    depth: float | None = None

    def observe_depth(self, depth: float) -> None:
        smoothing = SMOOTHING**self.speed_up
        self.depth = depth if self.depth is None else smoothing * self.depth + (1 - smoothing) * depth
        steered = self.beta * math.exp(GAIN * self.speed_up * (self.depth - self.target))
        self.beta = min(max(steered, self.minimum), self.maximum)

    def state(self) -> dict[str, float | None]:
        return {"beta": self.beta, "depth": self.depth}


@dataclass(kw_only=True)
class AdaptiveBeta(BetaControl):
    """Adapts β after each evaluation (paper, section on the 1.5B model).

    δ = L_dense − L_mix, where L_dense is the dense model's loss at the evaluation nearest to this step. If δ > FLAT, β
    rises by RISE · δ. If δ < −FLAT, β falls by FALL · |δ|. Otherwise β does not change.
    """

    dense_losses: Sequence[tuple[int, float]]

    def observe_loss(self, step: int, mix_loss: float) -> None:
        delta = nearest(self.dense_losses, step) - mix_loss
        if delta > FLAT:
            self.beta = min(self.beta + min(RISE * delta, LARGEST_MOVE), LARGEST_BETA)
        elif delta < -FLAT:
            self.beta = max(self.beta + max(FALL * delta, -LARGEST_MOVE), 0.0)


def nearest(losses: Sequence[tuple[int, float]], step: int) -> float:
    return min(losses, key=lambda recorded: (abs(recorded[0] - step), recorded[0]))[1]


def beta_control(settings: BetaSettings, num_steps: int, dense_log: Path | None = None) -> BetaControl:
    """Build the controller for a run of `num_steps`. An adaptive β needs the log.jsonl of a dense run."""
    if settings.adaptive:
        if dense_log is None:
            raise TrainingError("an adaptive β needs the log of a dense model's run; pass --dense-log")
        return AdaptiveBeta(beta=settings.initial, dense_losses=read_losses(dense_log))
    if settings.depth:
        return DepthSteering(beta=settings.initial, target=settings.depth, speed_up=speed_up(num_steps))
    return BetaControl(beta=settings.initial)


def read_losses(log: Path) -> list[tuple[int, float]]:
    """Read (step, validation loss) of each evaluation from a run's log."""
    try:
        reports = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        losses = [
            (int(report["step"]), float(report[VALIDATION_LOSS])) for report in reports if VALIDATION_LOSS in report
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{log}: cannot read the dense model's log ({error})") from error
    if not losses:
        raise TrainingError(f"{log}: contains no {VALIDATION_LOSS}; train the dense model with --validation")
    return losses
