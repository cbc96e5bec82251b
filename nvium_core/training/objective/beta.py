"""β, the weight of L_compute: fixed, or steered to a mean depth. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Any

GAIN = 0.05  # gain of the depth controller per step, in runs of at least LONG_RUN steps
SMOOTHING = 0.98  # decay of the depth's moving average per step, in runs of at least LONG_RUN steps
LONG_RUN = 3000  # runs of fewer steps steer faster


@dataclass(frozen=True, kw_only=True)
class BetaSettings:
    """β's initial value. If `depth` is not 0, β is steered to this mean depth."""

    initial: float
    depth: float = 0.0

    def __post_init__(self) -> None:
        if self.initial < 0 or not 0 <= self.depth < 1:
            raise ValueError(f"initial must not be negative, and depth in [0, 1); got {self.initial} and {self.depth}")


def speed_up(num_steps: int) -> float:
    """Return the factor by which to steer faster in a short run. Models respond with a delay, hence the square root."""
    return max(1.0, math.sqrt(LONG_RUN / num_steps))


@dataclass(kw_only=True)
class BetaControl:
    """β, and an integral controller that steers the mean depth Σ p_k l_k / L to `target`. If `target` is 0, β is fixed.

    Each step multiplies β by exp(gain · (smoothed depth − target)) and clamps it. `speed_up` multiplies the gain and
    divides the smoothing window. So the product of gain and window, which decides whether β overshoots, stays the same.
    """

    beta: float
    target: float = 0.0
    speed_up: float = 1.0
    minimum: float = 1e-3
    maximum: float = 1.0
    depth: float | None = None

    @classmethod
    def of(cls, settings: BetaSettings, num_steps: int, maximum: float = 1.0) -> "BetaControl":
        return cls(beta=settings.initial, target=settings.depth, speed_up=speed_up(num_steps), maximum=maximum)

    def observe_depth(self, depth: float) -> None:
        if self.target:
            smoothing = SMOOTHING**self.speed_up
            self.depth = depth if self.depth is None else smoothing * self.depth + (1 - smoothing) * depth
            steered = self.beta * math.exp(GAIN * self.speed_up * (self.depth - self.target))
            self.beta = min(max(steered, self.minimum), self.maximum)

    def state(self) -> dict[str, float | None]:
        return {"beta": self.beta, "depth": self.depth}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
