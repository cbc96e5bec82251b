"""β, the price of compute in the objective: fixed, steered to a mean depth, or adapted to a dense model's losses.

Plain arithmetic, no torch.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvium_core.errors import NviumError

VALIDATION_LOSS = "validation_loss"
"""The log's field of L_mix on the validation text; of a dense model its loss."""


GAIN = 0.05
"""Gain of the controller per step of a long run."""

SMOOTHING = 0.98
"""Decay of the depth's moving average per step of a long run."""

LONG_RUN = 3000
"""Steps of a long run, at least."""


class BetaError(NviumError, ValueError):
    """A dense model's log that cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class BetaSettings:
    """β's first value, and what changes it: a target mean depth (`depth`), or a dense model's losses (`adaptive`)."""

    initial: float
    depth: float = 0.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.initial < 0 or not 0 <= self.depth < 1:
            raise ValueError(f"initial must not be negative and depth in [0, 1), got {self.initial} and {self.depth}")
        if self.adaptive and self.depth:
            raise ValueError("β is either adaptive or steered: set beta.depth=0, or beta.adaptive=false")


@dataclass(kw_only=True)
class BetaControl:
    """Fixed; subclasses change β by what they observe."""

    beta: float

    def observe_depth(self, depth: float) -> None:
        """The mean depth Σ p_k l_k / L of a step."""

    def observe_loss(self, step: int, mix_loss: float) -> None:
        """L_mix of an evaluation after `step` steps."""

    def state(self) -> dict[str, float | None]:
        """The state that `restore` takes."""
        return {"beta": self.beta}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def haste(num_steps: int) -> float:
    """Speed-up of the steering in shorter runs: the root of the ratio, because the model needs steps to respond."""
    return max(1.0, math.sqrt(LONG_RUN / num_steps))


@dataclass(kw_only=True)
class DepthSteering(BetaControl):
    """β as an integral controller on the mean depth Σ p_k l_k / L.

    Each step multiplies β by exp(gain · (smoothed depth − target)), within bounds: too deep raises the price of
    compute, too shallow lowers it. `haste` multiplies the gain and divides the smoothing window, compared with a long
    run; their product, which decides whether β overshoots, stays.
    """

    target: float
    haste: float = 1.0
    minimum: float = 1e-3
    maximum: float = 1.0
    depth: float | None = None

    def observe_depth(self, depth: float) -> None:
        smoothing = SMOOTHING**self.haste
        self.depth = depth if self.depth is None else smoothing * self.depth + (1 - smoothing) * depth
        steered = self.beta * math.exp(GAIN * self.haste * (self.depth - self.target))
        self.beta = min(max(steered, self.minimum), self.maximum)

    def state(self) -> dict[str, float | None]:
        return {"beta": self.beta, "depth": self.depth}


@dataclass(frozen=True, kw_only=True)
class AdaptiveConstants:
    """The paper's (section on the 1.5B model)."""

    rise: float = 8.0
    fall: float = 4.0
    flat: float = 0.005
    largest_move: float = 100.0
    minimum: float = 0.0
    maximum: float = 10.0


@dataclass(kw_only=True)
class AdaptiveBeta(BetaControl):
    """β after each evaluation by the mixture's lead over a dense model (paper, section on the 1.5B model).

    With δ = L_dense − L_mix, the dense loss being the one recorded nearest to this step: inside ±`flat` β stays; ahead,
    it rises by `rise` · δ; behind, it falls by `fall` · |δ|.
    """

    dense_losses: Sequence[tuple[int, float]]
    constants: AdaptiveConstants = AdaptiveConstants()

    def observe_loss(self, step: int, mix_loss: float) -> None:
        c = self.constants
        lead = nearest(self.dense_losses, step) - mix_loss
        if lead > c.flat:
            self.beta = min(self.beta + min(c.rise * lead, c.largest_move), c.maximum)
        elif lead < -c.flat:
            self.beta = max(self.beta + max(c.fall * lead, -c.largest_move), c.minimum)


def nearest(losses: Sequence[tuple[int, float]], step: int) -> float:
    """The loss recorded nearest to a step, the earlier of two."""
    return min(losses, key=lambda recorded: (abs(recorded[0] - step), recorded[0]))[1]


def beta_control(settings: BetaSettings, num_steps: int, dense_log: Path | None = None) -> BetaControl:
    """The settings' controller for a run of `num_steps`; `dense_log` is the log.jsonl of a dense run, for an adaptive
    β."""
    if settings.adaptive:
        if dense_log is None:
            raise BetaError("an adaptive β needs the log of a dense model's run")
        return AdaptiveBeta(beta=settings.initial, dense_losses=read_losses(dense_log))
    if settings.depth:
        return DepthSteering(beta=settings.initial, target=settings.depth, haste=haste(num_steps))
    return BetaControl(beta=settings.initial)


def read_losses(log: Path) -> list[tuple[int, float]]:
    """(step, validation loss) of each evaluation in a run's log."""
    try:
        reports = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        losses = [
            (int(report["step"]), float(report[VALIDATION_LOSS])) for report in reports if VALIDATION_LOSS in report
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BetaError(f"{log}: {error}") from error
    if not losses:
        raise BetaError(f"{log}: holds no {VALIDATION_LOSS}; train the dense model with a validation text")
    return losses
